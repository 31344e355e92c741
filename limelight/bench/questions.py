"""What the clients of a benchmark ask: prompts that were made before, without end."""

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from limelight.bench import workload
from limelight.bench.tasks import Tasks
from limelight.checkpoint import BUNDLED_NAMES, locate
from limelight.config import EngineConfig
from limelight.engine.startup import Resolved, resolve
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import Request, SamplingParams

LENGTHS = (1024, 4096)  # of prompts and answers, at most half and what is left of the model's
BUNDLED_LENGTHS = (256, 128)
MARGIN = 8  # a prompt of words may be longer than asked for by one in so many tokens
PROMPTS_A_CLIENT, LEAST_PROMPTS = 4, 32  # asked again when all have been
SHIFT = 7  # prompts by which a round is ahead of the one before


@dataclass(frozen=True, slots=True)
class Asking:
    """What a user chose of it; None: by the model."""

    tasks: str | None
    prompt_len: int | None
    output_len: int | None
    temperature: float
    prompt_seed: int


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts, and how they are asked; `label` are the columns that say so."""

    prompts: list[list[int]]
    params: SamplingParams
    output_len: int
    label: dict[str, object]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @classmethod
    def of(cls, asking: Asking, config: EngineConfig, clients: int) -> "Questions":
        """For at most so many clients at once."""
        found = resolve(config)
        lengths = BUNDLED_LENGTHS if config.model in BUNDLED_NAMES else LENGTHS
        length = asking.prompt_len or min(lengths[0], found.max_model_len // 2)
        left = found.max_model_len - length - length // MARGIN
        output_len = asking.output_len or max(1, min(lengths[1], left))
        kind = asking.tasks or ("mixed" if _readable(config) else "random")
        count = max(LEAST_PROMPTS, PROMPTS_A_CLIENT * clients)
        prompts = _prompts(kind, length, config, found, random.Random(asking.prompt_seed), count)
        # An answer that means nothing has no end of its own.
        endless = kind == "random" or config.load_format == "dummy" or _synthetic(config)
        params = SamplingParams(
            temperature=asking.temperature, ignore_eos=endless, max_tokens=output_len
        )
        label = {"tasks": kind, "context": length, "output_len": output_len}
        label |= {"temperature": asking.temperature, "ignore_eos": endless}
        return cls(prompts, params, output_len, label)

    def requests(self, clients: int, round_: int) -> Iterator[Request]:
        """The same ones for whoever asks for a round, other ones in each.

        The first answers of the clients are cut at lengths that are evenly spread, so that the
        clients do not go on in step.
        """
        for index in itertools.count():
            most = self.output_len
            if index < clients:
                most = max(1, most * (2 * index + 1) // (2 * clients))
            yield Request(
                id=f"bench-{index}",
                prompt_token_ids=self.prompts[(index + SHIFT * round_) % len(self.prompts)],
                params=self.params,
                max_tokens=most,
                seed=round_ << 32 | index,
                arrival=time.monotonic(),
            )


def _readable(config: EngineConfig) -> bool:
    folder = locate(config.text_source, weights=False)
    return config.load_format != "dummy" and (folder / "tokenizer.json").exists()


def _synthetic(config: EngineConfig) -> bool:
    chosen = config.speculative
    return chosen is not None and chosen.synthetic_acceptance_rates is not None


def _prompts(
    kind: str, length: int, config: EngineConfig, found: Resolved, rng: random.Random, count: int
) -> list[list[int]]:
    if kind == "random":
        vocab = found.shape.vocab_size
        return workload.random_prompts(rng, batch=count, context=length, vocab=vocab)
    folder = locate(config.text_source, weights=False)
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, override=None)
    try:
        tasks = Tasks(kind, length=length, tokenizer=tokenizer, template=template)
        return [tasks.prompt(rng) for _ in range(count)]
    finally:
        if template is not None:
            template.close()
