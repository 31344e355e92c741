"""Tiny random checkpoints, written by transformers, and engines that run them: shared by tests."""

import itertools
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import BeamConfig, BeamForCausalLM, FlintConfig, FlintForCausalLM

from limelight.config import EngineConfig
from limelight.engine.engine import Engine
from limelight.engine.startup import start_engine
from limelight.progress import Progress
from limelight.types import Output, Request, SamplingParams, TokenLogprobs

logging.getLogger("transformers").setLevel(logging.ERROR)
VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 17,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
FLINT = COMMON | {
    "shared_expert_intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
BEAM = COMMON | {"n_group": 4, "topk_group": 2}
FAMILIES = {
    "flint": (FLINT, FlintConfig, FlintForCausalLM),
    "beam": (BEAM, BeamConfig, BeamForCausalLM),
}


def write_checkpoint(folder: Path, family: str, *, seed: int = 0, **changes: object):
    """Save a random checkpoint of the family in FP32; returns transformers' model of it."""
    base, config_class, model_class = FAMILIES[family]
    config = config_class(**(base | changes))
    model = model_class._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            mean, std = (1.0, 0.2) if "norm" in name else (0.0, 0.15)
            tensor.normal_(mean, std, generator=generator)
    model.save_pretrained(folder)
    return model


def start(folder: Path, **config: object) -> Engine:
    """An FP32 engine on the CPU."""
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 16} | config
    return start_engine(EngineConfig(model=str(folder), **settings), Progress(quiet=True)).engine


_ids = itertools.count()


def request(prompt: list[int], *, max_tokens: int = 8, seed: int = 0, **params: object) -> Request:
    """A request for `max_tokens` greedy tokens unless `params` say otherwise."""
    settings = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True} | params
    return Request(
        id=f"request-{next(_ids)}",
        prompt_token_ids=prompt,
        params=SamplingParams(**settings),
        max_tokens=max_tokens,
        seed=seed,
        arrival=time.monotonic(),
    )


@dataclass
class Answer:
    """All that a request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    last: Output | None = None

    def take(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.last = output


def run(engine: Engine, requests: list[Request]) -> list[Answer]:
    """Serve the requests together, checking the engine's invariants after each step."""
    answers = {one.id: Answer() for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            if output.request_id in answers:
                answers[output.request_id].take(output)
        engine.scheduler.check()
    return [answers[one.id] for one in requests]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
