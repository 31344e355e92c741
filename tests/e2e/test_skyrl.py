"""SkyRL's own clients, unmodified, drive a server: one for answers and control, one for weights.

They need SkyRL 0.4, and vLLM as its library. Weights go over gloo, by `vllm_over_gloo`.
"""

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from rollouts import free_port
from served import serve
from test_trainer import GREEDY, PROMPTS, TRANSFER, fresh
from trainers import BUNDLED, perturbed, tensors_of

remote = pytest.importorskip("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
pytestmark = pytest.mark.slow

MODEL = "flint-nano"
LAYERS, CHOSEN = 8, 2
# What SkyRL makes of its own defaults.
SAMPLING = {
    "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True,
    "max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1,
    "stop": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    flags = ("--device", "cpu", "--enable-rl", "--weight-transfer-config", TRANSFER)
    told = ("--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs")
    adapters = ("--enable-lora", "--allow-runtime-lora-updating")
    plain = ("--speculative-config", '{"num_speculative_tokens": 0}')
    with serve(tmp_path_factory.mktemp("log"), MODEL, *flags, *told, *adapters, *plain) as server:
        yield server.url


@pytest.fixture
def drive(url):
    """Runs what is to be done with a client, on options of its own."""

    @asynccontextmanager
    async def client(**options):
        given = {"proxy_url": url, "server_urls": [url], "data_parallel_size": 1} | options
        async with remote.RemoteInferenceClient(model_name=MODEL, **given) as one:
            yield one

    def run(work, **options):
        async def main():
            async with client(**options) as one:
                return await work(one)

        return asyncio.run(main())

    return run


def test_answers_have_tokens_log_probabilities_and_texts(drive):
    batch = {
        "prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "cache_salt": "3",
        "session_ids": ["a", "b", "c", "d"],
    }  # fmt: skip
    told = drive(lambda client: client.generate(batch))
    assert set(told["stop_reasons"]) <= {"stop", "length"}
    for ids, logprobs in zip(told["response_ids"], told["response_logprobs"], strict=True):
        assert 1 <= len(ids) == len(logprobs) <= 9 and np.isfinite(logprobs).all()
    assert all(isinstance(text, str) for text in told["responses"])


def test_turns_bring_the_experts_of_the_rows_that_are_new(drive):
    trace = pytest.importorskip("skyrl.backends.skyrl_train.utils.routed_experts")
    held = trace.RoutedExpertTrace()

    async def turns(client):
        prompt = list(PROMPTS[1])
        for _ in range(3):
            batch = {
                "prompt_token_ids": [prompt], "sampling_params": SAMPLING, "session_ids": ["t"],
                "routed_experts_prompt_starts": [held.prompt_start],
            }  # fmt: skip
            told = await client.generate(batch)
            [answer], [experts] = told["response_ids"], told["rollout_expert_indices"]
            # Raises unless the rows are exactly those that it lacks.
            held.record_generation(
                prompt_token_count=len(prompt), generated_token_count=len(answer),
                routed_experts=experts,
            )  # fmt: skip
            assert experts.shape[1:] == (LAYERS, CHOSEN) and experts.dtype == np.uint8
            prompt += [*answer, 7, 8, 9]

    drive(turns, enable_return_routed_experts=True)


def test_tokens_come_with_what_they_were_drawn_from(drive):
    sampling = SAMPLING | {"top_k": 5, "top_p": 0.9}
    batch = {
        "prompt_token_ids": PROMPTS, "sampling_params": sampling, "return_sample_support": True
    }  # fmt: skip
    told = drive(lambda client: client.generate(batch), enable_return_sample_support_set=True)
    for ids, rows in zip(told["response_ids"], told["rollout_sample_support"], strict=True):
        assert rows.shape == (len(ids), 5)
        assert all(id in row for id, row in zip(ids, rows, strict=True))


def test_samples_come_as_tinker_has_them(drive):
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[1]}]}, "num_samples": 3,
        "sampling_params": {"temperature": 1.0, "max_tokens": 6, "seed": 5},
        "include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "session_id": "s",
    }  # fmt: skip
    told = drive(lambda client: client.sample({"json": body}))
    assert len(told["sequences"]) == 3
    for one in told["sequences"]:
        assert len(one["tokens"]) == len(one["logprobs"])
    assert told["prompt_logprobs"][0] is None
    assert len(told["prompt_logprobs"]) == len(told["topk_prompt_logprobs"]) == len(PROMPTS[1])


def test_conversations_and_texts_pass_through(drive):
    messages = [{"role": "user", "content": "What is 2 + 3?"}]

    async def ask(client):
        chat = {"json": {"messages": messages, "max_tokens": 4, "session_id": "s"}}
        text = {"json": {"prompt": "Once", "max_tokens": 4}}
        asked = {"json": {"messages": messages}}
        return (
            await client.chat_completion(chat), await client.completion(text),
            await client.render_chat_completion(asked), await client.tokenize(["Once", "upon"]),
            await client.detokenize([[5, 6], [7]]), await client.finish_session("s"),
        )  # fmt: skip

    chat, text, rendered, tokens, texts, _ = drive(ask)
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert text["choices"][0]["finish_reason"] in ("stop", "length")
    assert rendered["token_ids"] and all(tokens) and len(texts) == 2


def test_an_unknown_model_is_told_in_words(drive):
    batch = {"prompt_token_ids": [[5]], "sampling_params": SAMPLING}
    with pytest.raises(remote.aiohttp.ClientResponseError, match="none") as raised:
        drive(lambda client: client.generate(batch, model="none"))
    assert raised.value.status == 404


def test_engines_are_paused_reset_put_to_sleep_and_woken(drive, url):
    async def control(client):
        assert await client.get_world_size() == (1, 1)
        told = [
            await client.pause_generation(), await client.reset_prefix_cache(True),
            await client.resume_generation(), await client.sleep(level=1),
            await client.wake_up(tags=["weights"]), await client.wake_up(tags=["kv_cache"]),
            await client.pause_generation(), await client.sleep_for_weight_sync(offload_kv=True),
            await client.wake_for_weight_sync(["weights"]),
            await client.wake_for_weight_sync(["kv_cache"]), await client.resume_generation(),
            await client.pause("abort", clear_cache=True), await client.resume(),
        ]  # fmt: skip
        return [one[url]["body"] for one in told]

    assert drive(control) == [
        {"status": "paused"}, {"success": True}, {"status": "resumed"},
        {"status": "sleeping", "level": 1}, {"status": "sleeping", "tags": ["weights"]},
        {"status": "awake", "tags": ["kv_cache"]},
        {"status": "paused"}, {"results": [None]}, {"results": [None]}, {"results": [None]},
        {"status": "resumed"}, {"status": "paused"}, {"status": "resumed"},
    ]  # fmt: skip


class Tensors:
    """A `WeightSource` of vLLM's over the tensors of a checkpoint."""

    def __init__(self, folder):
        self.tensors = tensors_of(folder)

    def metadata(self):
        base = pytest.importorskip("vllm.distributed.weight_transfer.base")
        return [
            base.ParamMeta(name=name, dtype=x.dtype, shape=tuple(x.shape))
            for name, x in self.tensors.items()
        ]

    def __iter__(self):
        return iter(self.tensors.items())


@pytest.fixture
def sender(url):
    """SkyRL's engine on the trainer's side, of tensors in a folder, over gloo."""
    pytest.importorskip("vllm")
    from skyrl.backends.skyrl_train.weight_sync import control_plane, weight_senders
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm_over_gloo import over_gloo

    info_type, engine_type = weight_senders.get_skyrl_nccl_trainer()
    client = control_plane.SkyrlWeightSyncClient(
        [url], 1, init_payload_fn=control_plane.nccl_init_payloads
    )
    with over_gloo(nccl_engine):
        info = info_type(
            master_address="127.0.0.1", master_port=free_port(), world_size=2, packed=True,
            packed_buffer_size_bytes=200_000, rank=0,
        )  # fmt: skip
        first = Tensors(BUNDLED / MODEL)
        engine = engine_type.trainer_init(info, client=client, source=first)
        engine.skyrl_draft_source = None
        yield engine
    client.close()


def greedy(client):
    params = GREEDY | {"logprobs": 1}
    return client.generate({"prompt_token_ids": PROMPTS, "sampling_params": params})


def test_a_trainers_weights_are_served_after_they_were_sent(drive, sender, tmp_path):
    other = perturbed(tmp_path / "other")
    before = drive(greedy)["response_ids"]

    async def update(client):
        await client.pause_generation()
        await client.reset_prefix_cache(reset_running_requests=True)
        await asyncio.to_thread(sender.send_weights)
        await client.resume_generation()
        return (await greedy(client))["response_ids"]

    sender.source = Tensors(other)
    assert drive(update) == fresh(str(other)) != before
    sender.source = Tensors(BUNDLED / MODEL)
    assert drive(update) == before


def test_a_wrong_shape_is_told_in_words(sender):
    sender.source.tensors["lm_head.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"lm_head.weight: shape \[3, 3\]"):
        sender.client.start_weight_update()
        names = sender.source.metadata()
        info = {"names": [one.name for one in names], "dtype_names": [], "shapes": []}
        info["dtype_names"] = [str(one.dtype).removeprefix("torch.") for one in names]
        info["shapes"] = [list(one.shape) for one in names]
        sender.client.update_weights(info)
    sender.source = Tensors(BUNDLED / MODEL)
    sender.send_weights()


def test_an_adapter_is_loaded_replaced_and_unloaded(drive, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    for seed in (1, 2):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(BUNDLED / MODEL, dtype=torch.float32)
        config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "o_proj"])
        adapted = peft.get_peft_model(base, config)
        with torch.no_grad():
            for name, x in adapted.named_parameters():
                if "lora_B" in name:
                    x.normal_(std=0.05)
        adapted.save_pretrained(tmp_path / str(seed))

    async def adapters(client):
        base = await client.generate(batch, model=MODEL)
        told, traffic = [base["response_logprobs"]], []
        for seed in ("1", "2"):
            await client.load_lora_adapter("skyrl-lora", str(tmp_path / seed))
            answer = await client.generate(batch | {"cache_salt": seed}, model="skyrl-lora")
            told.append(answer["response_logprobs"])
            # The second adapter takes the place of the first while these run.
            traffic.append(asyncio.create_task(client.generate(long, model="skyrl-lora")))
            await asyncio.sleep(0.1)
        for answer in await asyncio.gather(*traffic):
            assert [len(ids) for ids in answer["response_ids"]] == [100] * len(PROMPTS)
        await client.unload_lora_adapter("skyrl-lora")
        with pytest.raises(remote.aiohttp.ClientResponseError, match="skyrl-lora"):
            await client.generate(batch, model="skyrl-lora")
        return told

    batch = {"prompt_token_ids": PROMPTS[:2], "sampling_params": GREEDY | {"logprobs": 1}}
    long = {"prompt_token_ids": PROMPTS, "sampling_params": GREEDY | {"max_tokens": 100}}
    told = drive(adapters, uses_lora_weight_sync=True)
    assert all(one != other for one, other in pairwise(told))
