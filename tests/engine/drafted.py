"""Engines with drafters, random ones and such as know the right answer: shared by tests."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from drafters import config_json, write_drafter
from tiny import start

from limelight.checkpoint import locate
from limelight.engine.engine import Engine
from limelight.models.loader import read_config

Drafts = Callable[[str, int], list[int]]  # of a request, behind so many tokens of its answer


def start_drafted(
    folder: Path, drafter: Path, *, num_drafts: int = 7, adaptive: bool = False, **config: object
) -> Engine:
    """An engine whose every step drafts."""
    method = config.pop("draft_sample_method", "greedy")
    speculative = {
        "model": str(drafter), "num_speculative_tokens": num_drafts,
        "enable_adaptive_verification": adaptive, "draft_sample_method": method,
    }  # fmt: skip
    return start(folder, speculative_config=speculative, **config)


def inject(engine: Engine, drafts: Drafts) -> None:
    """Let `drafts` say what is drafted, whatever the drafter thinks."""
    runner = engine.runner
    drafter = runner.drafted.drafter
    draft = type(drafter).draft.__get__(drafter)

    def injected(rows_B, seeds_B, temperature_B):
        odds_BN = draft(rows_B, seeds_B, temperature_B)
        for slot in rows_B.tolist():
            if slot not in runner.slots:
                continue
            request = runner.slots[slot].request
            made = int(drafter.lengths_S[slot]) + 1 - len(request.prompt_token_ids)
            ids = drafts(request.id, made)[: drafter.num_drafts]
            if ids:
                drafter.tokens_SN[slot, : len(ids)] = torch.tensor(ids)
                if drafter.draws:
                    drafter.ids_SNK[slot, : len(ids), 0] = torch.tensor(ids)
        return odds_BN

    drafter.draft = injected


def knowing(answers: dict[str, list[int]], *, right: float, seed: int = 0) -> Drafts:
    """Drafts of the known answers, of which a share is right and the others one off."""
    rng = random.Random(seed)

    def drafts(request_id: str, made: int) -> list[int]:
        following = answers[request_id][made : made + 15]
        return [token if rng.random() < right else (token + 1) % 97 for token in following]

    return drafts


def write_drafter_for(target: str, folder: Path) -> Path:
    """A small random drafter of a bundled model."""
    shape = read_config(locate(target))[1]
    json_ = config_json(
        drafting={"mask_token_id": 1, "final_logit_softcapping": None},
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        num_attention_heads=2 * shape.num_kv_heads, num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, num_target_layers=shape.num_layers,
    )  # fmt: skip
    write_drafter(folder, json_)
    return folder


__all__ = [
    "config_json",
    "inject",
    "knowing",
    "start_drafted",
    "write_drafter",
    "write_drafter_for",
]
