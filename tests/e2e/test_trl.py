"""TRL's own client, unmodified, drives a server; it needs TRL, and vLLM as its library."""

import concurrent.futures
import math
import socket

import pytest
import torch
from rollouts import free_port
from served import serve
from trainers import perturbed, tensors_of
from transformers import AutoModelForCausalLM

from limelight import LLM, SamplingParams
from limelight.rl.nccl import fetch_unique_id

vllm_client = pytest.importorskip("trl.generation.vllm_client")
PROMPTS = [[5, 6, 7, 8], list(range(40, 90))]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "generation_kwargs": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    # Of its own GPU, the last one; the trainer has the first.
    on_gpu = torch.cuda.device_count() > 1
    backend = "nccl" if on_gpu else "gloo"
    flags = ("--device", "cuda" if on_gpu else "cpu", "--dtype", "float32", "--enable-rl")
    env = {"CUDA_VISIBLE_DEVICES": str(torch.cuda.device_count() - 1)} if on_gpu else {}
    transfer = ("--weight-transfer-config", f'{{"backend": "{backend}"}}', "--max-logprobs", "-1")
    folder = tmp_path_factory.mktemp("log")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with serve(folder, "flint-nano", *flags, *transfer) as server:
            yield server.url


@pytest.fixture(scope="module")
def client(url):
    return vllm_client.VLLMClient(base_url=url)


def test_the_server_is_what_the_client_looks_for(client):
    assert client.model == "flint-nano" and client.get_world_size() == 1
    told = client.get_server_info()
    assert told["weight_transfer_config"] is not None and told["lora_config"] is None
    assert told["model_config"]["dtype"] == "torch.float32"


def test_prompts_of_token_ids_are_answered_choice_by_choice(client):
    told = client.generate(PROMPTS, n=3, max_tokens=5, generation_kwargs={"seed": 1})
    assert told["prompt_ids"] == PROMPTS
    assert len(told["completion_ids"]) == 6
    for ids, logprobs in zip(told["completion_ids"], told["logprobs"], strict=True):
        assert 0 < len(ids) == len(logprobs) <= 5
        assert all(-99 < value <= 0 for [value] in logprobs)
    chosen = [[id for [id] in ids] for ids in told["logprob_token_ids"]]
    assert chosen == told["completion_ids"]


def test_conversations_and_texts_are_answered(client):
    told = client.chat([[{"role": "user", "content": "Hi"}]], n=2, max_tokens=4)
    assert len(told["completion_ids"]) == 2 and told["prompt_ids"][0]
    assert client.generate(["Once upon"], max_tokens=3)["completion_ids"][0]


def test_a_teacher_scores_what_others_wrote(client):
    told = client.get_sequence_logprobs([[5, 6, 7, 8, 9]], [2], top_logprobs=4)
    assert len(told["logprobs"][0]) == 3 and len(told["logprobs"][0][0]) == 4
    assert all(math.isfinite(value) for row in told["logprobs"][0] for value in row)
    assert told["actual_token_ids"] == [[[7], [8], [9]]]


def test_the_cache_is_reset(client):
    client.reset_prefix_cache()


def test_the_id_is_found_in_the_store_of_the_trainers_library():
    utils = pytest.importorskip("vllm.distributed.utils")
    wrapper = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    id = wrapper.ncclUniqueId.from_buffer_copy(bytes(range(128)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def tell():
        group = utils.StatelessProcessGroup.create("127.0.0.1", port, 0, 2)
        group.broadcast_obj(id, src=0)
        return group

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        group = pool.submit(tell)
        found = fetch_unique_id("127.0.0.1", port, world_size=2, seconds=10)
        assert group.result(10).rank == 0
    assert found == bytes(range(128))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="trainer and server need a GPU each")
def test_a_whole_model_is_sent(client, tmp_path):
    send_another(client, tmp_path / "model", "cuda:0")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the server is one for NCCL")
def test_a_whole_model_is_sent_over_gloo_and_a_wrong_shape_before_it_refused(client, tmp_path):
    from vllm_over_gloo import over_gloo

    client.group_port = free_port()
    with over_gloo(vllm_client):
        send_another(client, tmp_path / "model", "cpu", wrong=True)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the server is one for NCCL")
def test_the_client_of_asynchronous_training_pauses_and_sends(client, url, tmp_path):
    transfer = pytest.importorskip("trl.experimental.async_grpo.weight_transfer")
    from accelerate import PartialState
    from vllm_over_gloo import over_gloo

    PartialState()  # TRL's log asks for it
    one = transfer.VLLMClient(url, server_timeout=10)
    assert one.get_max_model_len() > 0 and one.get_dtype() == "torch.float32"
    assert one.get_server_info()["parallel_config"]["data_parallel_size"] == 1
    tensors = tensors_of(perturbed(tmp_path / "model", seed=2))
    info = {
        "names": list(tensors), "shapes": [list(x.shape) for x in tensors.values()],
        "dtype_names": [str(x.dtype).removeprefix("torch.") for x in tensors.values()],
    }  # fmt: skip
    before = client.generate(PROMPTS, **GREEDY)["completion_ids"]
    with over_gloo(transfer):
        weights = transfer.WeightTransferClient(one, info)
        weights.init_weight_transfer()
        weights.pause()
        weights.send_weights(iter(tensors.items()))
        weights.resume()
        weights.destroy()
    after = client.generate(PROMPTS, **GREEDY)["completion_ids"]
    assert after == said_afresh(tmp_path / "model") != before


def send_another(client, other, device, *, wrong=False):
    """Send other weights than are served: the server then says what a fresh engine says of them."""
    perturbed(other)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).to(device)
    client.init_communicator(device="cuda" if device == "cpu" else device)
    before = client.generate(PROMPTS, **GREEDY)["completion_ids"]
    if wrong:
        info = {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [[3, 3]]}
        client._start_weight_update()
        with pytest.raises(Exception, match=r"400, .*lm_head.weight: shape \[3, 3\]"):
            client._post(f"{client.base_url}/update_weights", json={"update_info": info})
    client.update_model_params(model)
    client.reset_prefix_cache()
    after = client.generate(PROMPTS, **GREEDY)["completion_ids"]
    assert after == said_afresh(other, torch.device(device).type) != before


def said_afresh(folder, device="cpu"):
    """The answers of an engine that starts with these weights."""
    with LLM(model=str(folder), device=device, dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        told = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    return [list(answer.outputs[0].token_ids) for answer in told]
