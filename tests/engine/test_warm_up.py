"""What an engine runs before it serves."""

import pytest
from tiny import prompts, request, run, start, write_checkpoint

from limelight.config import EngineConfig
from limelight.engine import warm_up
from limelight.engine.startup import plan_memory, resolve, start_engine
from limelight.ops.decode import tile_of
from limelight.ops.paging import FEW_QUERIES
from limelight.progress import Progress
from limelight.runner.runner import ModelRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("flint")
    write_checkpoint(path, "flint")
    return str(path)


def config_of(folder, *, max_num_seqs, max_num_batched_tokens=2048):
    return EngineConfig(
        model=folder, device="cpu", max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip


def mixed(steps):
    """How many sequences decode in each step that has a prompt beside them."""
    counts = [sum(grant.num_tokens == 1 for grant in grants) for grants in steps]
    return [n for n, grants in zip(counts, steps, strict=True) if 0 < n < len(grants)]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8], ids="K{}".format)
@pytest.mark.parametrize("max_num_seqs", [2, 7, 64, 600], ids="S{}".format)
def test_no_request_waits_for_the_attention_of_steps_with_prompts_to_be_compiled(
    folder, max_num_seqs, kv_heads
):
    config = config_of(folder, max_num_seqs=max_num_seqs)
    plan = plan_memory(config, resolve(config))
    warm = mixed(warm_up._warm_steps(plan, plan.chunk - 1, on_gpu=True))
    for window in (None, 65):
        for fp8 in (False, True):
            served, warmed = (
                {tile_of(n * kv_heads, window=window, fp8=fp8) for n in counts}
                for counts in (range(1, min(max_num_seqs, plan.chunk - FEW_QUERIES)), warm)
            )
            assert served == warmed


@pytest.mark.parametrize("max_num_seqs", [1, 5], ids="S{}".format)
@pytest.mark.parametrize("batched", [8, 40, 300], ids="T{}".format)
def test_the_steps_that_warm_a_gpu_up_keep_to_the_limits_and_run(
    folder, monkeypatch, max_num_seqs, batched
):
    make, execute, sizes = warm_up._warm_steps, ModelRunner.execute, []

    def counted(runner, plan):
        sizes.append((len(plan.grants), sum(grant.num_tokens for grant in plan.grants)))
        return execute(runner, plan)

    monkeypatch.setattr(warm_up, "_warm_steps", lambda *given, on_gpu: make(*given, on_gpu=True))
    monkeypatch.setattr(ModelRunner, "execute", counted)
    config = config_of(folder, max_num_seqs=max_num_seqs, max_num_batched_tokens=batched)
    start_engine(config, Progress(quiet=True))
    assert max(seqs for seqs, _ in sizes) == max_num_seqs
    assert max(tokens for _, tokens in sizes) <= max(batched, max_num_seqs)


def test_the_null_block_stays_zero_where_drafts_are_warmed_and_served(flint, drafter):
    config = EngineConfig(
        model=str(flint), device="cpu", max_num_seqs=4, max_model_len=256,
        speculative_config={"model": str(drafter), "num_speculative_tokens": 7},
    )  # fmt: skip
    started = start_engine(config, Progress(quiet=True))
    runner, found = started.engine.runner, resolve(config).drafter
    before = runner.storage.pool.clone()
    warm_up._warm_drafts(runner, found, started.plan, longest=100)
    assert not runner.storage.pool.equal(before)
    runner.forget()
    run(started.engine, [request(text, max_tokens=20) for text in prompts(20, 30, 61)])
    assert not runner.storage.pool[:, :, :, : runner.block_size].any()


@pytest.mark.parametrize("length", [2, 23])
def test_a_model_of_the_shortest_length_starts_with_its_drafter(length):
    served = start("flint-nano", max_model_len=length, max_num_seqs=2)
    [answer] = run(served, [request([5], max_tokens=length - 1)])
    assert len(answer.token_ids) == length - 1
    served.close()
