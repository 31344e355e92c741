"""A trainer brings codes, scales or plain numbers to a server that holds MXFP8, as SkyRL does."""

import json

import pytest
from served import serve
from trainers import BUNDLED, perturbed, tensors_of

from limelight import LLM, SamplingParams
from limelight.rl.mxfp8 import coded
from limelight.rl.sender import SendFailed, WeightSender

pytestmark = pytest.mark.slow
TRANSFER = '{"backend": "gloo", "timeout": 20}'
PROMPTS = [[5, 6, 7, 8], list(range(40, 90))]
IGNORED = ["lm_head", "re:.*self_attn.gate_proj"]
OVERRIDE = {"quantization_config": {"quant_algo": "MXFP8", "ignore": IGNORED}}


@pytest.fixture(scope="module", params=["flint-nano", "beam-nano"])
def model(request):
    return request.param


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """It begins with weights that no one has trained."""
    flags = (
        "--device", "cpu", "--enable-rl", "--weight-transfer-config", TRANSFER,
        "--load-format", "dummy", "--hf-overrides", json.dumps(OVERRIDE),
    )  # fmt: skip
    with serve(tmp_path_factory.mktemp("log"), model, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    """Other weights, and what an engine says that starts with them."""
    folder = perturbed(tmp_path_factory.mktemp("other") / "model", model)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    config = {"quantization": "mxfp8", "quantization_config": {"ignore": IGNORED}}
    with LLM(model=str(folder), device="cpu", dtype="float32", **config) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        said = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
    return folder, said


def order(server, call, body):
    told = server.http.post(call, json=body)
    assert told.status_code == 200, told.text
    return told.json()


def answers(server):
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    bodies = [{"token_ids": ids, "sampling_params": params} for ids in PROMPTS]
    told = [order(server, "/inference/v1/generate", body) for body in bodies]
    return [one["choices"][0]["token_ids"] for one in told]


def send(server, tensors, **options):
    with WeightSender(server.url, backend="gloo", device="cpu", seconds=20, **options) as sender:
        sender.send(tensors.items())


def test_all_ways_to_send_leave_the_weights_of_a_fresh_start(server, model, other):
    folder, said = other
    told = server.http.get("/server_info?config_format=json").json()["vllm_config"]["quantization"]
    assert "model.layers.0.self_attn.q_proj" in told["mxfp8"]
    assert {"lm_head", "model.embed_tokens"} <= set(told["float32"])
    assert ("model.layers.0.self_attn.gate_proj" in told["float32"]) == (model == "beam-nano")
    tensors = tensors_of(folder)
    codes = dict(coded(tensors.items(), ignore=IGNORED))
    sums = []
    for sent, options in ((codes, {}), (tensors_of(BUNDLED / model), {}), (tensors, {})):
        send(server, sent, **options)
        sums.append(order(server, "/weight_checker", {"action": "checksum"})["checksum"])
    assert answers(server) == said
    send(server, codes, packed=False)
    sums.append(order(server, "/weight_checker", {"action": "checksum"})["checksum"])
    assert sums[0] == sums[2] == sums[3] != sums[1]
    assert answers(server) == said


def test_codes_without_scales_are_an_error_that_names_them(server, other):
    name = "model.layers.0.self_attn.o_proj.weight"
    codes = dict(coded(tensors_of(other[0]).items(), ignore=IGNORED))
    whole = dict(codes)
    del codes[f"{name}_scale"]
    with pytest.raises(SendFailed, match=f"brought {name} without {name}_scale"):
        send(server, codes)
    told = server.http.post(
        "/inference/v1/generate", json={"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}
    )
    assert told.status_code == 503
    send(server, whole)
    assert answers(server) == other[1]
