"""The tokenizer of a family: byte-level BPE, digits one by one, its own tags as tokens."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nano.chat import Family
from nano.conversations import talk
from nano.words import WORDS, read_code

VOCABULARY = 4096
CONVERSATIONS = 6_000
# Often enough that each word becomes one token, with a blank before it and without.
WORD_LISTS = 300


def train(family: Family) -> tokenizers.Tokenizer:
    """Special tokens have the first ids, in the order of the family; other tags the last ones."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(family.added),
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(family), trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in family.added])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def load(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def _texts(family: Family) -> Iterator[str]:
    yield from read_code().values()
    rng = random.Random(0)
    tags = re.compile("|".join(re.escape(tag) for tag in (*family.special, *family.added)))
    for _ in range(CONVERSATIONS):
        item = talk(rng, name=family.name)
        for segment in family.segments(item, thinking=rng.random() < 0.3):
            yield from tags.split(segment.text)
    for _ in range(WORD_LISTS):
        yield " ".join(WORDS)
        yield "\n".join(WORDS)
