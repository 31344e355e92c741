"""Steps of every shape that serving has, run once at the start: no request pays for them."""

from itertools import product

from limelight.engine import pretended
from limelight.engine.drafters import FoundDrafter
from limelight.engine.memory import MemoryPlan
from limelight.ops.far import PIECE, QUERIES
from limelight.ops.paging import FEW_QUERIES
from limelight.progress import Progress
from limelight.runner.logprobs import COUNTS
from limelight.runner.runner import ModelRunner
from limelight.steps import Grant, StepPlan
from limelight.types import SamplingParams

# Tokens of steps beside the largest: each regime of the kernels, in multiples of 16 and not.
WARM_SIZES = (2048, 1030, 260, 128, 70, 64, 33, 16, 9, 7, 2, 1)
# Sequences that decode beside a prompt of WARM_PROMPT tokens: every regime of attention, whatever
# the number of KV heads.
WARM_DECODING = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WARM_PROMPT = 2 * FEW_QUERIES


def warm_up(
    runner: ModelRunner, plan: MemoryPlan, progress: Progress, drafter: FoundDrafter | None = None
) -> None:
    """Run the shapes of serving once, in a block of the empty cache: no request pays for them.

    On a GPU the largest step shows that the plan's work space is enough, and the others that every
    kernel has been compiled.
    """
    longest = min(plan.chunk, plan.max_model_len - 1)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, repetition_penalty=1.1)
    on_gpu = runner.device.type == "cuda"
    slots = (1, 0) if on_gpu and runner.adapters.has_room else (0,)  # with adapters and without
    admitted = [
        pretended.admit(plan.max_num_seqs, longest + 1, params, adapter_slot=slot) for slot in slots
    ]
    steps = _warm_steps(plan, longest, on_gpu=on_gpu)
    kinds = (False,) if drafter is None else (True, False)  # with drafts and without
    with progress.phase("warming up", len(steps)) as advance:
        for grants in steps:
            for admissions, drafts in product(admitted, kinds):
                runner.execute(StepPlan(admissions[: len(grants)], grants, drafts=drafts))
            advance(1)
    if runner.device.type == "cuda":
        _warm_pieces(runner, plan)
        _warm_logprobs(runner, plan, longest)
        runner.sampler.masks.meet()
    if drafter is not None and runner.device.type == "cuda":
        _warm_drafts(runner, drafter, plan, longest)
    runner.forget()


def _warm_pieces(runner: ModelRunner, plan: MemoryPlan) -> None:
    """Every number of queries for which cuDNN needs a plan, with a piece of keys before them where
    there can be one. Elsewhere they are steps like others."""
    params = SamplingParams(temperature=0.0)
    for rows in range(QUERIES, min(plan.chunk, plan.max_model_len - 1) + 1, QUERIES):
        start = PIECE if PIECE + rows < plan.max_model_len else 0
        tables, admissions = (
            pretended.tables(plan, start + rows), pretended.admit(1, start + rows, params)
        )  # fmt: skip
        runner.execute(StepPlan(admissions, [Grant(0, start, rows, tables, True)]))


def _warm_logprobs(runner: ModelRunner, plan: MemoryPlan, longest: int) -> None:
    """Log-probabilities of every number of best tokens that has kernels of its own, with cut-offs
    and without, of one row and of as many as there can be."""
    tables = pretended.tables(plan, longest)
    for count, seqs, top_p in product(COUNTS, sorted({1, plan.max_num_seqs}), (0.9, 1.0)):
        params = SamplingParams(temperature=1.0, top_p=top_p, logprobs=count)
        grants = [Grant(slot, longest, 1, tables, True) for slot in range(seqs)]
        runner.execute(StepPlan(pretended.admit(seqs, longest, params), grants))


def _warm_drafts(
    runner: ModelRunner, drafter: FoundDrafter, plan: MemoryPlan, longest: int
) -> None:
    """Steps with as many drafts as there can be, greedy and drawn, alone and beside a prompt; with
    rules that have to be asked and without."""
    drafts, length = drafter.num_drafts, longest + 1
    if length + plan.ahead > plan.max_model_len:
        return
    tables = pretended.tables(plan, length)
    most = max(1, min(plan.max_num_seqs, plan.chunk // (1 + drafts)))
    ways = product((1.0, 1.1), ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9)))
    for penalty, (temperature, top_p) in ways:
        params = SamplingParams(temperature=temperature, top_p=top_p, repetition_penalty=penalty)
        admissions = pretended.admit(plan.max_num_seqs, length, params)
        for count in sorted({1, most}):
            grants = [Grant(i, length, 1 + drafts, tables, True, drafts) for i in range(count)]
            runner.pretend(length)
            runner.execute(StepPlan(admissions[:count], grants, drafts=True))
        if plan.max_num_seqs > 1 and (prompt := min(plan.chunk - 1 - drafts, longest)) > 0:
            beside = [grants[0], Grant(1, 0, prompt, tables, True)]
            runner.pretend(length)
            runner.execute(StepPlan(admissions[:2], beside, drafts=True))


def _warm_steps(plan: MemoryPlan, longest: int, *, on_gpu: bool) -> list[list[Grant]]:
    """Prompts of each size alone, from the `longest` down; then sequences that decode, and on a
    GPU also beside a prompt: such steps have attention kernels of their own."""
    tables = pretended.tables(plan, longest)

    def decoding(count: int) -> list[Grant]:
        return [Grant(slot, longest, 1, tables, True) for slot in range(count)]

    sizes = {min(size, longest) for size in ([longest, *WARM_SIZES] if on_gpu else [512])}
    steps = [[Grant(0, 0, size, tables, True)] for size in sorted(sizes, reverse=True)]
    steps += [decoding(count) for count in (1, min(8, plan.max_num_seqs), plan.max_num_seqs)]
    if on_gpu and longest > FEW_QUERIES:
        room = min(plan.max_num_seqs - 1, plan.chunk - WARM_PROMPT)
        prompt = min(WARM_PROMPT, longest)
        for count in sorted({min(count, room) for count in WARM_DECODING}):
            if count > 0:
                steps.append([*decoding(count), Grant(count, 0, prompt, tables, True)])
    return steps
