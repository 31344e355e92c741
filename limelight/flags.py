"""Command-line flags made from config fields, and what becomes of vLLM's flags that are not ours.

A field's name, default and help stand once, in `config.py`; only flags that were given reach the
config. Flags that mean nothing here are ignored with a word, flags of features that are still to
come are refused by name.
"""

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, fields
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

from limelight.settings import ENVIRONMENT, environment, without_none

T = TypeVar("T")

# vLLM's flags without a meaning here: (number of values, why).
IGNORED: dict[str, tuple[int | str, str]] = {
    "--all2all-backend": (1, "--moe-backend says how rows reach experts"),
    "--allowed-headers": (1, "every header is allowed"),
    "--allowed-methods": (1, "GET and POST are what there is to allow"),
    "--api-server-count": (1, "one process serves HTTP"),
    "--attention-backend": (1, "the engine chooses its own kernels"),
    "--chat-template-content-format": (1, "templates get the parts of a message as one text"),
    "--compilation-config": (1, "nothing is compiled while serving"),
    "--cuda-graph-sizes": ("+", "the engine chooses its own sizes"),
    "--cudagraph-capture-sizes": ("+", "the engine chooses its own sizes"),
    "--disable-access-log-for-endpoints": (1, "probes and readings of /metrics are never logged"),
    "--disable-cascade-attn": (0, "the engine chooses its own kernels"),
    "--disable-custom-all-reduce": (0, "there is no other all-reduce to choose"),
    "--disable-fastapi-docs": (0, "there are no such pages"),
    "--disable-log-requests": (0, "the texts of requests are never logged"),
    "--disable-log-stats": (0, "/metrics has the figures and costs nothing unless read"),
    "--disable-uvicorn-access-log": (0, "the log is the same for all requests"),
    "--distributed-executor-backend": (1, "one process runs the model"),
    "--enable-chunked-prefill": (0, "long prompts are always computed in chunks"),
    "--enable-log-deltas": (0, "the texts of answers are never logged"),
    "--enable-log-outputs": (0, "the texts of answers are never logged"),
    "--enable-log-requests": (0, "the texts of requests are never logged"),
    "--enable-mixed-moe-lora-format": (0, "every layout of an adapter file is read"),
    "--enable-scale-out": (0, "the routes that it enables are always there"),
    "--enable-server-load-tracking": (0, "/load always tells it"),
    "--enable-sleep-mode": (0, "with --enable-rl the engine can always be put to sleep"),
    "--fully-sharded-loras": (0, "adapters are divided as the weights beside them are"),
    "--guided-decoding-backend": (1, "xgrammar holds answers to their form"),
    "--h11-max-header-count": (1, "heads of requests may have 64 KiB"),
    "--h11-max-incomplete-event-size": (1, "heads of requests may have 64 KiB"),
    "--language-model-only": (0, "there are no other parts of a model"),
    "--limit-mm-per-prompt": (1, "there are no images, audio or video"),
    "--linear-backend": (1, "the engine chooses its own kernels"),
    "--max-cudagraph-capture-size": (1, "the engine chooses its own sizes"),
    "--max-log-len": (1, "the texts of requests are never logged"),
    "--max-parallel-loading-workers": (1, "tensors are loaded one at a time, in place"),
    "--max-seq-len-to-capture": (1, "graphs are for all lengths"),
    "--model-loader-extra-config": (1, "tensors are loaded one at a time, in place"),
    "--optimization-level": (1, "nothing is compiled while serving"),
    "--prefix-caching-hash-algo": (1, "hashes are keyed BLAKE2"),
    "--safetensors-load-strategy": (1, "tensors are loaded one at a time, in place"),
    "--swap-space": (1, "preempted requests are computed again, not swapped"),
    "--tokenizer-mode": (1, "there is one kind of tokenizer"),
    "--trust-remote-code": (0, "code in a checkpoint is never run"),
    "--use-tqdm-on-load": (0, "progress is shown where there is a terminal"),
    "--uvicorn-log-level": (1, "the log is the same for all requests"),
}

# JSON flags that choose another engine's kernels: their aliases, and the keys they may have.
BACKEND_CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "--attention-config": (
        ("-ac",),
        (
            "backend", "backend_per_kind", "flash_attn_version", "use_trtllm_attention",
            "disable_flashinfer_q_quantization", "use_prefill_query_quantization",
        ),
    ),
    "--kernel-config": (
        (),
        (
            "moe_backend", "linear_backend", "linear_backend_per_quant", "enable_jit_warmup",
            "enable_flashinfer_autotune", "ir_op_priority",
        ),
    ),
}  # fmt: skip

# vLLM's flags of features that are still to come, and values of flags that we have.
UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "--allow-credentials": (),
    "--config": (),
    "--cpu-offload-gb": (),
    "--data-parallel-address": (),
    "--data-parallel-rank": (),
    "--data-parallel-size-local": (),
    "--download-dir": (),
    "--enable-eplb": (),
    "--enable-per-request-metrics": (),
    "--headless": (),
    "--kv-events-config": (),
    "--kv-transfer-config": (),
    "--log-config-file": (),
    "--logits-processors": (),
    "--max-num-partial-prefills": (),
    "--middleware": (),
    "--num-gpu-blocks-override": (),
    "--otlp-traces-endpoint": (),
    "--pipeline-parallel-size": ("-pp",),
    "--return-tokens-as-token-ids": (),
    "--root-path": (),
    "--ssl-certfile": (),
    "--ssl-keyfile": (),
    "--tokenizer-revision": (),
    "--tool-parser-plugin": (),
    "--trust-request-chat-template": (),
    "--uds": (),
}
UNSUPPORTED_VALUES: dict[str, tuple[str, ...]] = {
    "dtype": ("half", "float16"),
    "lora_dtype": ("float16",),
    "kv_cache_dtype": ("float16", "fp8_e5m2", "nvfp4"),
    "quantization": (
        "awq",
        "bitsandbytes",
        "compressed-tensors",
        "fp8",
        "fp8_per_block",
        "fp8_per_tensor",
        "gptq",
        "modelopt",
        "modelopt_fp4",
        "mxfp4",
    ),
    "load_format": ("gguf", "mistral", "runai_streamer", "sharded_state", "tensorizer"),
}
# Values that choose another engine's kernels: they stand for the default here.
FOREIGN_VALUES: dict[str, tuple[str, ...]] = {
    "moe_backend": (
        "aiter", "cutlass", "cutlass_block_scaled", "deep_gemm", "deep_gemm_mega_moe", "emulation",
        "flashinfer_cutedsl", "flashinfer_cutlass", "flashinfer_moe_ep_cutedsl",
        "flashinfer_trtllm", "humming", "marlin", "triton", "triton_unfused",
    ),
}  # fmt: skip
# Behind a number, as vLLM has them.
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
WHOLE = re.compile(r"(-?\d+)([KMGT]?)|(-?\d+(?:\.\d+)?)([kmgt])")
SWITCHED = {"1": True, "true": True, "0": False, "false": False}
FLAG = re.compile(r"(--[a-zA-Z][\w-]*)((?:\.\w[\w-]*)*)(=.*)?", re.DOTALL)


def add_config_flags(parser: argparse.ArgumentParser, config_class: type, *, title: str):
    """One flag for each field of `config_class`, in a group of its own."""
    add: Callable[..., argparse.Action] = parser.add_argument_group(title).add_argument
    hints = get_type_hints(config_class)
    for item in fields(config_class):
        names = ["--" + item.name.replace("_", "-"), *item.metadata["aliases"]]
        form = _form(item.name, hints[item.name])
        add(*names, dest=item.name, default=argparse.SUPPRESS, help=_help(item), **form)


def _help(item: Field[object]) -> str:
    text = str(item.metadata["help"])
    if item.default is not None and not isinstance(item.default, bool):
        text += f" (default: {item.default})"
    elif item.default is True:
        text += " (default: on)"
    return text.replace("%", "%%")


def _form(name: str, hint: object) -> dict[str, object]:
    """How argparse is to read a value of the annotation `hint`."""
    hint = without_none(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        options = get_args(hint)
        return {"type": _choice(name, options), "metavar": "{" + ",".join(options) + "}"}
    metavar = name.split("_")[-1].upper()
    if get_origin(hint) is list:
        return {"nargs": "+", "type": get_args(hint)[0], "metavar": metavar}
    if get_origin(hint) is dict:
        return {"type": json_object, "action": "append", "metavar": "JSON"}
    return {"type": whole if hint is int else hint, "metavar": metavar}


def _choice(name: str, options: tuple[str, ...]):
    def choice(text: str) -> str:
        if text in (*options, *FOREIGN_VALUES.get(name, ())):
            return text
        fault = "is not supported yet" if text in UNSUPPORTED_VALUES.get(name, ()) else "is unknown"
        raise argparse.ArgumentTypeError(f"{text!r} {fault}; choose from {', '.join(options)}")

    return choice


def json_object(text: str) -> dict[str, object]:
    """`text` as a JSON object; what argparse shows to the user if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return value


def whole(text: str) -> int:
    """`text` as a whole number, also with one of `UNITS`: 25.6k is 25,600, and 8K is 8,192."""
    found = WHOLE.fullmatch(text)
    value = found and Fraction(found[1] or found[3]) * UNITS[found[2] or found[4] or ""]
    if value is None or value.denominator != 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number, also as 8k (thousands) or 8K (of 1,024), got {text!r:.50}"
        )
    return int(value)


def positive(text: str) -> int:
    """`text` as a number of things, of which there is one at least."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r:.50}")
    return int(text)


def new_file(text: str) -> str:
    """`text` as the name of a file that can be written once there is something to write."""
    folder = Path(text).parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(folder)!r:.200}")
    return text


def merge(objects: Iterable[dict[str, object]]) -> dict[str, object]:
    """One object of several; where two hold objects under a key, these are merged as well."""
    merged: dict[str, object] = {}
    for item in objects:
        for key, value in item.items():
            old = merged.get(key)
            both = isinstance(old, dict) and isinstance(value, dict)
            merged[key] = merge([old, value]) if both else value  # type: ignore[list-item]
    return merged


def spell(argv: list[str]) -> list[str]:
    """`argv` in the one spelling that the parser knows.

    Underscores in the names of flags become dashes, and `--x.key value` becomes
    `--x={"key": value}`.
    """
    spelled: list[str] = []
    rest = iter(argv)
    for token in rest:
        match = FLAG.fullmatch(token)
        if token == "--":
            return [*spelled, token, *rest]
        if match is None:
            spelled.append(token)
            continue
        name, path, value = match[1].replace("_", "-"), match[2], match[3]
        if path:
            value = "=" + _undot(name + path, path, value, rest)
        spelled.append(name + (value or ""))
    return spelled


def _undot(flag: str, path: str, value: str | None, rest: Iterator[str]) -> str:
    text = next(rest, None) if value is None else value[1:]
    if text is None:
        raise ValueError(f"argument {flag}: expected a value")
    try:
        nested = json.loads(text)
    except (ValueError, RecursionError):
        nested = text
    for key in reversed(path[1:].split(".")):
        nested = {key: nested}
    return json.dumps(nested)


def config_from(args: argparse.Namespace, config_class: type[T], **defaults: object) -> T:
    """A `config_class` of what the command line sets, else the environment, else `defaults`."""
    values = dict(defaults)
    hints = get_type_hints(config_class)
    for item in fields(config_class):  # type: ignore[arg-type]
        if hasattr(args, item.name):
            value = getattr(args, item.name)
            values[item.name] = _joined(value) if isinstance(value, list) else value
        elif item.name in ENVIRONMENT and (text := environment(item.name)) is not None:
            values[item.name] = _from_text(item.name, text, hints[item.name])
    make: Callable[..., T] = config_class
    return make(**values)


def _from_text(name: str, text: str, hint: object) -> object:
    """What an environment variable says."""
    if hint is bool:
        if text.lower() not in SWITCHED:
            raise ValueError(f"{' or '.join(ENVIRONMENT[name])} must be 1 or 0; got {text!r}")
        return SWITCHED[text.lower()]
    return [text] if any(get_origin(option) is list for option in get_args(hint)) else text


def _joined(values: list[object]) -> object:
    """Objects as one; a list that came as JSON in one argument, as vLLM takes it, as a list."""
    match values:
        case [dict(), *_]:
            return merge(values)  # type: ignore[arg-type]
        case [str(text)] if text.startswith("["):
            try:
                return json.loads(text)
            except ValueError as error:
                raise ValueError(f"{text!r} is not a JSON list: {error}") from error
    return values


def add_foreign_flags(parser: argparse.ArgumentParser):
    """vLLM's flags that are not ours, left out of the help; `check_foreign` judges them."""
    add: Callable[..., argparse.Action] = partial(
        parser.add_argument, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    for name, (count, _) in IGNORED.items():
        form = {"nargs": count} if count else {"action": argparse.BooleanOptionalAction}
        add(name, dest=name, **form)
    for name, (aliases, _) in BACKEND_CHOICES.items():
        add(name, *aliases, dest=name, type=json_object, action="append")
    for name, aliases in UNSUPPORTED.items():
        add(name, *aliases, dest=name, nargs="*")


def check_foreign(args: argparse.Namespace) -> list[str]:
    """A line for each flag that is ignored; `ValueError` for one whose feature is still to come."""
    if names := [name for name in vars(args) if name in UNSUPPORTED]:
        verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
        raise ValueError(f"{', '.join(names)} {verb} not supported yet; leave {them} out")
    warnings = []
    for name, values in FOREIGN_VALUES.items():
        if getattr(args, name, None) in values:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            warnings.append(f"{flag} is ignored: the engine chooses its own kernels")
            delattr(args, name)
    for name in vars(args):
        if name in IGNORED:
            warnings.append(f"{name} is ignored: {IGNORED[name][1]}")
        if name in BACKEND_CHOICES:
            known = BACKEND_CHOICES[name][1]
            for key in merge(getattr(args, name)):
                if key not in known:
                    raise ValueError(f"{name} has no key {key!r}; it has {', '.join(known)}")
            warnings.append(f"{name} is ignored: the engine chooses its own kernels")
    return warnings


def check_leftover(leftover: list[str], parser: argparse.ArgumentParser):
    """`ValueError` with the nearest name if the parser left anything unread."""
    for token in leftover:
        if not token.startswith("-"):
            continue
        flag = token.partition("=")[0]
        known = set(re.findall(r"--[a-z][a-z-]*", parser.format_help()))
        near = difflib.get_close_matches(flag, sorted(known), n=1, cutoff=0.5)
        raise ValueError(f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else ""))
    if leftover:
        raise ValueError(f"unexpected argument {leftover[0]!r}")
