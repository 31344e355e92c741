"""TRL's GRPOTrainer, unmodified, learns with a served model; it needs TRL, and vLLM beside it."""

import json

import pytest
from trainers import BUNDLED

pytestmark = pytest.mark.slow
pytest.importorskip("trl")
pytest.importorskip("vllm")

STEPS = 2
SMALL = f"--steps {STEPS} --groups 2 --samples 4 --held-out 4 --lr 1e-3".split()


def test_after_each_step_with_adapters_the_server_has_them_within_its_weights(tmp_path):
    pytest.importorskip("peft")
    from grpo import main

    main(["beam-nano", *SMALL, "--steps", "3", "--lora", "8", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "log.json").read_text())
    assert 0 < told["tensors_changed"] < told["tensors"]
    assert len(told["rows"]) == 3 and all(row["abs_diff"] < 1e-4 for row in told["rows"])


def test_after_each_step_the_server_has_the_weights_of_trls_trainer(tmp_path):
    from grpo import arguments, train
    from rollouts import Sums, generate, serving, transfer_flags
    from transformers import AutoTokenizer

    from limelight import LLM, SamplingParams

    args = arguments().parse_args(["flint-nano", *SMALL, "--out", str(tmp_path)])
    options = {"device": "cpu", "dtype": "float32", "flags": transfer_flags("cpu")}
    with serving("flint-nano", log=tmp_path / "server.log", **options) as url:
        told = train("flint-nano", url, args)
        sums = Sums(AutoTokenizer.from_pretrained(BUNDLED / "flint-nano"), 0, 16)
        answers = generate(url, sums.held_out, seed=0, temperature=0.0, max_tokens=8)
    assert len(told["steps"]) == STEPS
    # TRL's own figure: were the weights of a step not there, it would be far from this.
    assert all(step["abs_diff"] < 1e-4 for step in told["steps"])
    assert told["tensors_changed"] > told["tensors"] // 2
    with LLM(model=str(tmp_path / "model"), device="cpu", dtype="float32") as llm:
        prompts = [{"prompt_token_ids": one.token_ids} for one in sums.held_out]
        fresh = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8))
    assert [one.token_ids for [one] in answers] == [list(a.outputs[0].token_ids) for a in fresh]


def test_one_command_leaves_a_log(tmp_path, capsys):
    from grpo import main

    main(["flint-nano", *SMALL, "--steps", "1", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "log.json").read_text())
    assert told["tensors_changed"] and told["rows"][0]["abs_diff"] < 1e-4
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["score_after"] is not None
