"""Sequences that nobody asked for, in one block of the empty cache: to warm up and time steps."""

from limelight.engine.memory import MemoryPlan
from limelight.steps import Admission
from limelight.types import Request, SamplingParams


def admit(
    count: int, length: int, params: SamplingParams, *, adapter_slot: int = 0
) -> list[Admission]:
    """Into slots from 0, each with a prompt of `length` tokens, and with the same adapter."""
    request = Request(
        id="pretended", prompt_token_ids=[0] * length, params=params, max_tokens=1, seed=0
    )
    return [Admission(slot, request, [], adapter_slot) for slot in range(count)]


def tables(plan: MemoryPlan, length: int) -> list[tuple[int, list[int]]]:
    """Of a sequence whose next token has the position `length`, in each group of the cache."""
    held = min(length + 1 + plan.ahead, plan.max_model_len)
    return [(0, [1] * -(-held // plan.block.size))] * len(plan.groups)
