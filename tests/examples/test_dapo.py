"""The reference trainer: a served model learns, and says what the trainer's own would."""

import json

import numpy as np
import pytest
import torch
from dapo import ADAPTER, Batch, Trainer, arguments, delivery_flags, main, train
from rollouts import Answer, Question, Sums, generate, serving
from safetensors.torch import load_file
from trainers import BUNDLED
from transformers import AutoTokenizer

from limelight import LLM, SamplingParams

SMALL = "--groups 2 --samples 4 --held-out 4 --updates 2 --warm-up 0 --lr 1e-3".split()


CASES = [
    ("flint-nano", []),
    pytest.param(("flint-nano", ["--lora", "8"]), marks=pytest.mark.slow),
    pytest.param(("beam-nano", ["--lora", "8"]), marks=pytest.mark.slow),
    pytest.param(("flint-nano", ["--quantization", "mxfp8"]), marks=pytest.mark.slow),
]


@pytest.fixture(params=CASES, ids=["flint", "flint-lora", "beam-lora", "flint-mxfp8"])
def args(request, tmp_path):
    model, way = request.param
    if "--lora" in way:
        pytest.importorskip("peft")
    flags = [model, *SMALL, "--dtype", "float32", "--steps", "2", "--out", str(tmp_path)]
    return arguments().parse_args([*flags, *way])


@pytest.fixture
def server(args):
    quantized = ["--quantization", args.quantization] if args.quantization else []
    options = {"device": "cpu", "dtype": "float32", "flags": delivery_flags(args) + quantized}
    with serving(args.model, log=args.out / "server.log", **options) as url:
        yield url


def test_after_a_step_the_server_says_what_the_trainers_weights_say(args, server):
    trainer = Trainer(args.model, args)
    before = dict(load_file(BUNDLED / args.model / "model.safetensors"))
    rows = list(train(args.model, args, server, trainer))
    assert [row["step"] for row in rows] == [0, 1, 2] and {"score", "reward"} <= set(rows[0])
    # Numbers between two codes may fall to either.
    near = 0.01 if args.quantization else 1e-4
    assert all(row["abs_diff_replayed"] < near for row in rows[:2])
    plain = trainer.model.merge_and_unload() if args.lora else trainer.model
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(plain.state_dict()[name], before[name].float())
    plain.save_pretrained(args.out / "model")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / args.model)
    questions = Sums(tokenizer, 0, 16).held_out
    told = generate(
        server, questions, ADAPTER if args.lora else None, seed=0, temperature=0.0, max_tokens=8
    )
    config = {"device": "cpu", "dtype": "float32", "quantization": args.quantization}
    with LLM(model=str(args.out / "model"), **config) as llm:
        prompts = [{"prompt_token_ids": one.token_ids} for one in questions]
        fresh = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8))
    assert [one.token_ids for [one] in told] == [list(a.outputs[0].token_ids) for a in fresh]


def batch(*flags):
    """Two answers to [5, 6]: 7, 8 and a cut 9."""
    asked = Question([5, 6], "3")
    told = (
        Answer([7, 8], [-0.5, -0.25], np.full((3, 4, 2), [3, 1], dtype="uint8"), truncated=False),
        Answer([9], [-2.0], np.full((2, 4, 2), [2, 4], dtype="uint8"), truncated=True),
    )
    group = [(asked, told[0], 1.0), (asked, told[1], 0.0)]
    return Batch.of([group], arguments().parse_args(["flint-nano", *flags]), 2)


def test_a_batch_has_answers_behind_prompts_and_experts_for_every_token():
    made = batch()
    assert made.tokens_BS.tolist() == [[5, 6, 7, 8], [5, 6, 9, 0]]
    assert made.sampled_BS.tolist() == [[0.0, -0.5, -0.25], [0.0, -2.0, 0.0]]
    # The last token of a sequence and padding have any distinct ones.
    assert made.ids_BSLN[0, :, 3].tolist() == [[3, 1], [3, 1], [3, 1], [0, 1]]
    assert made.ids_BSLN[1, :, 0].tolist() == [[2, 4], [2, 4], [0, 1], [0, 1]]


def test_answers_that_were_cut_do_not_count_unless_they_are_kept():
    assert batch().counts_BS.tolist() == [[False, True, True], [False] * 3]
    assert batch("--keep-overlong").counts_BS[1].tolist() == [False, True, False]


def test_adapters_are_not_trained_beside_quantized_weights(capsys):
    with pytest.raises(SystemExit):
        main(["flint-nano", "--lora", "4", "--quantization", "mxfp8"])
    assert "--lora" in capsys.readouterr().err


def test_flags_for_a_server_that_is_there_already_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["flint-nano", "--url", "http://127.0.0.1:1", "--max-num-seqs", "8"])
    assert "--max-num-seqs 8" in capsys.readouterr().err


@pytest.mark.slow
def test_one_command_leaves_a_log_a_picture_and_a_model(tmp_path):
    main(
        ["beam-nano", *SMALL, "--steps", "1", "--out", str(tmp_path), "--json", str(tmp_path / "j")]
    )
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert json.loads((tmp_path / "j").read_text())["rows"] == rows
    assert (tmp_path / "rewards.png").exists() and (tmp_path / "model/config.json").exists()
