"""Answers that a constraint allows, found by walking it at random over Flint's vocabulary."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers
import xgrammar

import limelight.nano
from limelight.text.tokenizer import Tokenizer
from limelight.types import Constraint

FLINT = Path(limelight.nano.__path__[0]) / "flint-nano"
CLOSERS = ('"', "}", "]", "<", "0", "1", "},", '"}', '"]')


@lru_cache
def _compiler(marks):
    library = tokenizers.Tokenizer.from_file(str(FLINT / "tokenizer.json"))
    vocabulary = library.get_vocab(with_added_tokens=True)
    texts = [""] * (max(vocabulary.values()) + 1)
    for text, token_id in vocabulary.items():
        # The letter of the byte 0xff in a byte-level vocabulary: no text has it.
        texts[token_id] = ("\xff" if token_id in marks else "") + text
    info = xgrammar.TokenizerInfo(
        texts, vocab_type=xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[0, 2, 4]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def flint():
    return Tokenizer.load(FLINT)


def compiled(constraint):
    """The constraint (or a format) as the engine has it."""
    if not isinstance(constraint, Constraint):
        tag = json.dumps({"type": "structural_tag", "format": constraint})
        constraint = Constraint(tag=tag)
    compiler = _compiler(frozenset(constraint.marks))
    return compiler.compile_structural_tag(constraint.tag)


def allows(constraint, ids):
    """Whether these tokens are a whole answer."""
    matcher = xgrammar.GrammarMatcher(compiled(constraint))
    return all(matcher.accept_token(token_id) for token_id in ids) and matcher.is_completed()


def allows_text(format, text):
    matcher = xgrammar.GrammarMatcher(compiled(format))
    return matcher.accept_string(text) and matcher.is_completed()


def walk(tokenizer, grammar, random, *, most=50):
    """The tokens of a whole answer, chosen at random; None where it found no end."""
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    marks = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) in CLOSERS]
    closing = np.array([*marks, *range(4088, 4096)])
    ids = []
    while not matcher.is_completed() or (random.random() < 0.9 and len(ids) < most):
        if len(ids) > 4 * most:
            return None
        matcher.fill_next_token_bitmask(mask)
        allowed = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little").astype(bool)
        allowed[tokenizer.eos_token_ids] = False
        choice = closing[allowed[closing]]
        if not len(choice) or (len(ids) < most and random.random() < 0.6):
            choice = np.flatnonzero(allowed)
        if not len(choice):
            break
        ids.append(int(choice[random.randrange(len(choice))]))
        assert matcher.accept_token(ids[-1])
    return ids if matcher.is_completed() else None
