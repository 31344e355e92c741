"""What a user may choose: frozen, validated once, and the only reader of the environment.

Each field is a flag of `limelight serve` under vLLM's name; its help stands beside it. Below the
engine, values are handed down one by one, never the config.
"""

import json
from dataclasses import dataclass
from typing import Literal

from limelight.checkpoint import BUNDLED_DRAFTERS
from limelight.lora import check_room, read_modules
from limelight.settings import check_at_least, check_choices, setting
from limelight.speculative import SpeculativeConfig
from limelight.types import LogprobsMode, LoRARequest
from limelight.weight_transfer import WeightTransfer

DEFAULT_MODEL = "flint-nano"
# What the JSON of --structured-outputs-config may hold; the one value where there is no choice.
STRUCTURED_OUTPUTS: dict[str, tuple[object, ...]] = {
    "backend": ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"),
    "disable_fallback": (True, False),
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
    "enable_in_reasoning": (False,),
}
LONGEST_SILENCE = 86_400.0  # seconds
PARSERS = ("glm47", "beam")
MoeBackend = Literal["auto", "allgather_reducescatter", "all2all", "all2all_pipelined"]
REASONING_MARKS = ("reasoning_start_str", "reasoning_end_str")


def check_parsers(reasoning: str | None, calls: str | None):
    """Refuse parsers that do not exist, and two that cannot read the same answers."""
    for name in (reasoning, calls):
        if name not in (None, "auto", *PARSERS):
            raise ValueError(f"there is no parser {name!r}, only {' and '.join(PARSERS)}")
    if reasoning != calls and "beam" in (reasoning, calls):
        raise ValueError(
            "the beam parser reads reasoning and calls together: give both "
            "--reasoning-parser beam and --tool-call-parser beam"
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Which model runs, where, in what precision, and how much at once."""

    model: str = setting(DEFAULT_MODEL, "bundled model, local folder or hub id")
    tokenizer: str | None = setting(None, "where the tokenizer comes from, if not from the model")
    hf_config_path: str | None = setting(None, "where config.json comes from, if not the model")
    revision: str | None = setting(None, "commit, branch or tag of a model on the hub")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: cuda where there is one")
    dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto",
        "precision of weights and activations; auto: float32 on a CPU, elsewhere the checkpoint's",
    )
    quantization: Literal["mxfp8", "modelopt_mxfp8"] | None = setting(
        None, "mxfp8: quantize plain weights as they are loaded; modelopt_mxfp8: they are so",
        aliases=("-q",),
    )  # fmt: skip
    quantization_config: dict[str, object] | None = setting(
        None, 'JSON object: {"ignore": [modules that are not to be quantized]}'
    )
    hf_overrides: dict[str, object] | None = setting(
        None, 'JSON object: {"quantization_config": {...}} in place of that of config.json'
    )
    load_format: Literal["auto", "safetensors", "dummy"] = setting(
        "auto", "dummy: random weights with realistic statistics, from config.json alone"
    )
    seed: int = setting(0, "seed of dummy weights")
    max_model_len: int | None = setting(
        None, "most tokens of prompt and answer together; default: what the model was made for"
    )
    max_num_seqs: int = setting(64, "most sequences in one step")
    max_num_batched_tokens: int = setting(2048, "most tokens in one step; longer prompts are cut")
    long_prefill_token_threshold: int = setting(
        0, "most tokens of one prompt in a step, so that shorter ones get on beside it; 0: no limit"
    )
    block_size: int = setting(16, "tokens in a block of the KV cache")
    enable_prefix_caching: bool = setting(True, "reuse the KV cache of equal beginnings")
    prefix_hash_seed: str | None = setting(
        None, "key of the prefix hashes; default: random, so that no one can guess them"
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "fp8", "fp8_e4m3"] = setting(
        "auto", "precision of the KV cache; auto: that of the model; fp8 (E4M3) takes half of BF16"
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "bytes of the KV cache; default: what gpu_memory_utilization leaves"
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of the GPU's whole memory to use in all; on a CPU, of what is free"
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "who goes first: by arrival, or by the request's priority and then arrival"
    )
    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs",
        "raw: log-probabilities of the model; processed: of what tokens are drawn from, behind "
        "penalties, masks, temperature and cut-offs; or the logits of either",
    )
    enable_return_routed_experts: bool = setting(
        False, "return with each answer the experts that its tokens went to, for routing replay"
    )
    batch_invariant: bool = setting(
        False,
        "results of a request that do not depend on what else is computed with it, bit for bit; "
        "slower",
    )
    enforce_eager: bool = setting(False, "run decode steps without CUDA graphs")
    async_scheduling: bool = setting(
        True, "plan and start a step on the GPU while the one before runs"
    )
    enable_lora: bool = setting(False, "make room for LoRA adapters, which requests may name")
    max_lora_rank: int = setting(16, "largest rank of an adapter")
    max_loras: int = setting(1, "most adapters in one step")
    max_cpu_loras: int | None = setting(
        None, "adapters that host memory keeps; default: as many as max_loras"
    )
    lora_dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto", "precision of adapters; auto: that of the model; float32: as PEFT trains them"
    )
    merge_lora_experts: bool = setting(
        False, "add an adapter's part of routed experts to their weights, one adapter at a time"
    )
    lora_modules: list[str] | None = setting(
        None, 'adapters to start with: name=folder, or JSON as {"name": ..., "path": ...}'
    )
    tensor_parallel_size: int = setting(1, "devices that share one model", aliases=("-tp",))
    enable_expert_parallel: bool = setting(
        False, "let each of the tp x dp ranks hold whole experts, instead of a part of each",
        aliases=("-ep",),
    )  # fmt: skip
    moe_backend: MoeBackend = setting(
        "auto", "how rows reach experts on other ranks: all everywhere, which graphs can hold, "
        "each where its experts are, or that in chunks; auto: by the number of rows",
    )  # fmt: skip
    expert_dispatch_dtype: Literal["auto", "fp8"] = setting(
        "auto", "fp8: rows travel to experts in half the bytes, with a scale for each 128 numbers"
    )
    expert_load_file: str | None = setting(
        None, "write there, now and then, how many tokens each expert of each layer got"
    )
    expert_placement: list[str] | None = setting(
        None, "files with recorded loads, by which experts are spread over the ranks"
    )
    num_redundant_experts: int = setting(0, "second copies of experts, of the busiest ones")
    weight_transfer_config: dict[str, object] | None = setting(
        None, 'JSON object that lets a trainer send new weights: {"backend": "nccl"}'
    )
    enable_pickled_ipc_handles: bool = setting(
        False, "take CUDA IPC handles, by which a client chooses what memory is mapped"
    )
    speculative_config: dict[str, object] | None = setting(
        None,
        "JSON object about drafting, in vLLM's keys; default: the drafter that is bundled with the "
        'model, if any; {"num_speculative_tokens": 0}: none',
        aliases=("-sc",),
    )

    def __post_init__(self):
        check_choices(self)
        if self.speculative_config is not None:
            ranks = SpeculativeConfig.of(self.speculative_config).draft_tensor_parallel_size
            if ranks not in (None, self.tensor_parallel_size):
                raise ValueError(
                    f"--speculative-config: draft_tensor_parallel_size {ranks} is not the "
                    f"model's {self.tensor_parallel_size}, as which the drafter is divided"
                )
        check_at_least(
            self, max_model_len=2, max_num_seqs=1, max_num_batched_tokens=1, block_size=1,
            long_prefill_token_threshold=0, kv_cache_memory_bytes=1, tensor_parallel_size=1,
            num_redundant_experts=0, max_loras=1, max_cpu_loras=1,
        )  # fmt: skip
        self._check_adapters()
        if self.batch_invariant and self.tensor_parallel_size > 2:
            raise ValueError(
                "batch_invariant takes at most 2 ranks: in what order more are summed depends on "
                "how much is summed at once"
            )
        WeightTransfer.of(
            self.weight_transfer_config or {}, pickled=self.enable_pickled_ipc_handles
        )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1; "
                f"got {self.gpu_memory_utilization}"
            )

    def _check_adapters(self):
        check_room(
            max_rank=self.max_lora_rank, max_loras=self.max_loras,
            max_cpu_loras=self.max_cpu_loras, merges=self.merge_lora_experts,
        )  # fmt: skip
        if (self.adapters or self.merge_lora_experts) and not self.enable_lora:
            raise ValueError("--lora-modules and --merge-lora-experts need --enable-lora")
        if self.enable_lora and self.batch_invariant and not self.merge_lora_experts:
            raise ValueError(
                "batch_invariant does not hold with adapters beside routed experts: leave "
                "--enable-lora out, or give --merge-lora-experts"
            )
        if self.merge_lora_experts and self.weight_transfer_config:
            raise ValueError(
                "new weights would not be those that adapters are merged with: give "
                "--weight-transfer-config or --merge-lora-experts"
            )

    @property
    def adapters(self) -> list[LoRARequest]:
        """Those to start with."""
        return read_modules(self.lora_modules or ())

    @property
    def weight_transfer(self) -> WeightTransfer:
        """How new weights come, if at all."""
        return WeightTransfer.of(
            self.weight_transfer_config or {}, pickled=self.enable_pickled_ipc_handles
        )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """How to draft, if at all."""
        given = self.speculative_config
        if given is None and self.load_format != "dummy" and self.model in BUNDLED_DRAFTERS:
            given = {"model": BUNDLED_DRAFTERS[self.model], "enable_adaptive_verification": True}
        chosen = None if given is None else SpeculativeConfig.of(given)
        return None if chosen is None or chosen.num_speculative_tokens == 0 else chosen

    @property
    def text_source(self) -> str:
        """Where tokenizer and template come from: a .gguf file has neither beside it."""
        beside = self.hf_config_path if self.model.endswith(".gguf") else None
        return self.tokenizer or beside or self.model


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the HTTP server listens, whom it lets in and how much it takes."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 opens it to the network")
    port: int = setting(8000, "port to listen on; 0: any free one")
    api_key: list[str] | None = setting(None, "keys that a client may bring; default: no key")
    enable_rl: bool = setting(
        False, "let a trainer pause the engine, have it sleep, and send new weights"
    )
    admin_api_key: list[str] | None = setting(
        None, "keys for what --enable-rl adds; default: as for all else"
    )
    served_model_name: list[str] | None = setting(
        None, "names that requests may use; the first is reported; default: the model's"
    )
    allowed_origins: list[str] | None = setting(None, "origins that a browser may call from")
    max_num_queued_reqs: int = setting(1024, "most requests that wait; above: 503")
    max_num_queued_tokens: int | None = setting(None, "most prompt tokens that wait; above: 503")
    max_logprobs: int = setting(20, "most logprobs a request may ask for; -1: no limit")
    max_body_bytes: int = setting(8 * 2**20, "largest request body")
    data_parallel_size: int = setting(
        1, "engines of the model, each with GPUs (or a share of the CPU) of its own",
        aliases=("-dp",),
    )  # fmt: skip
    ray: bool = setting(False, "serve by Ray Serve, on a cluster of it or on this machine")
    replicas: int = setting(1, "engines that Ray Serve starts")
    max_replicas: int | None = setting(
        None, "engines that Ray Serve may start where many requests are open"
    )
    allow_runtime_lora_updating: bool = setting(
        False, "take /v1/load_lora_adapter and /v1/unload_lora_adapter, by which a client makes "
        "the server read any folder that it can",
    )  # fmt: skip
    restart_engine: int = setting(0, "how often an engine that died or hangs is started anew")
    shutdown_timeout: float = setting(30.0, "seconds that running requests get after SIGTERM")
    chat_template: str | None = setting(None, "file with a chat template to use instead")
    default_chat_template_kwargs: dict[str, object] | None = setting(
        None, "JSON object of defaults for the chat template"
    )
    generation_config: str = setting(
        "auto", "auto: sampling defaults of the model; vllm: neutral ones"
    )
    override_generation_config: dict[str, object] | None = setting(
        None, "JSON object of sampling defaults that go before those"
    )
    reasoning_parser: Literal["glm47", "beam"] | None = setting(
        None, "format of the reasoning in answers of chat; default: all text is content"
    )
    tool_call_parser: Literal["glm47", "beam"] | None = setting(
        None, "format of calls of tools; only with --enable-auto-tool-choice"
    )
    enable_auto_tool_choice: bool = setting(False, "let the model call the tools of a request")
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "leave tools out of the prompt when a request says tool_choice none"
    )
    tool_strict_level: Literal["auto", "function", "parameter"] = setting(
        "auto", "parameter: as if each tool were strict; function, or auto: as each tool says"
    )
    enforce_strict_tool_calling: bool = setting(
        True, "hold calls that the model is free to make to strict tools, as forced ones always are"
    )
    beam_always_constrain_output: bool = setting(
        True, "hold each answer of the beam parser to its form, not only where a request needs it"
    )
    reasoning_config: dict[str, object] | None = setting(
        None, "JSON object with reasoning_start_str and reasoning_end_str, for thinking budgets"
    )
    structured_outputs_config: dict[str, object] | None = setting(
        None, "JSON object as vLLM takes it; disable_any_whitespace makes JSON answers compact"
    )
    stop_in_reasoning: bool = setting(
        False, "look for stop texts in reasoning too, not only in the content of an answer"
    )
    keep_cut_calls: bool = setting(
        False, "tell a call that was cut short as the content's last text, as the model wrote it"
    )
    stream_interval: int = setting(1, "tokens that a stream collects for a chunk after the first")
    sse_keep_alive_interval: float = setting(
        0.0, "seconds without news after which a stream sends a comment, for proxies; 0: never"
    )
    reasoning_content: bool = setting(
        True, "tell reasoning under its old name reasoning_content too"
    )
    enable_prompt_tokens_details: bool = setting(True, "report cached prompt tokens in usage")
    enable_force_include_usage: bool = setting(False, "send usage at the end of every stream")
    enable_tokenizer_info_endpoint: bool = setting(
        False, "show the tokenizer's settings and the chat template at /tokenizer_info"
    )
    enable_request_id_headers: bool = setting(False, "echo X-Request-Id")

    def __post_init__(self):
        check_choices(self)
        check_at_least(
            self, port=0, data_parallel_size=1, replicas=1, max_replicas=1, restart_engine=0,
            max_num_queued_reqs=0, max_num_queued_tokens=0, max_logprobs=-1, max_body_bytes=1,
            stream_interval=1,
        )  # fmt: skip
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535; got {self.port}")
        if "" in (self.served_model_name or ()):
            raise ValueError("a served_model_name is empty")
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must not be negative; got {self.shutdown_timeout}")
        if not 0 <= (seconds := self.sse_keep_alive_interval) <= LONGEST_SILENCE:
            raise ValueError(
                f"sse_keep_alive_interval must be from 0 to {LONGEST_SILENCE}; got {seconds}"
            )
        if self.ray and self.enable_rl:
            raise ValueError("--enable-rl is not supported with --ray; -dp N is")
        if not self.ray and (self.replicas > 1 or self.max_replicas is not None):
            raise ValueError("--replicas and --max-replicas need --ray; -dp N needs no Ray")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas must be at least replicas, {self.replicas}; got {self.max_replicas}"
            )
        self._check_parsers()
        self._check_objects()

    def _check_parsers(self):
        reasoning, calls = self.reasoning_parser, self.tool_call_parser
        if self.enable_auto_tool_choice and calls is None:
            raise ValueError(
                "--enable-auto-tool-choice needs --tool-call-parser, which reads the calls"
            )
        check_parsers(reasoning, calls)

    def _check_objects(self):
        for key, value in (self.structured_outputs_config or {}).items():
            options = STRUCTURED_OUTPUTS.get(key)
            if options is None:
                known = ", ".join(STRUCTURED_OUTPUTS)
                raise ValueError(f"--structured-outputs-config has no key {key!r}; it has {known}")
            if not any(type(value) is type(option) and value == option for option in options):
                raise ValueError(
                    f"--structured-outputs-config: {key} must be one of "
                    f"{', '.join(map(json.dumps, options))}; got {value!r}"
                )
        given = self.reasoning_config
        if given is None:
            return
        for key, value in given.items():
            if key not in REASONING_MARKS:
                known = ", ".join(REASONING_MARKS)
                raise ValueError(f"--reasoning-config has no key {key!r}; it has {known}")
            if not isinstance(value, str) or not value:
                raise ValueError(f"--reasoning-config: {key} must be a text that is not empty")
        needed = REASONING_MARKS[1:] if self.reasoning_parser else REASONING_MARKS
        for key in needed:
            if key not in given:
                raise ValueError(f"--reasoning-config needs {key}")

    @property
    def answer_format(self) -> str | None:
        """The one format that answers are read by, if any."""
        return self.reasoning_parser or (self.tool_call_parser if self.reads_calls else None)

    @property
    def reads_calls(self) -> bool:
        return self.enable_auto_tool_choice and self.tool_call_parser is not None
