"""How a choice of the user is declared: a dataclass field that is a flag, and its checks."""

import os
from dataclasses import field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

# Of a published command, honoured beside ours.
ENVIRONMENT = {
    "api_key": ("LIMELIGHT_API_KEY", "VLLM_API_KEY"),
    "allow_runtime_lora_updating": (
        "LIMELIGHT_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    ),
    "batch_invariant": ("LIMELIGHT_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"),
    "admin_api_key": ("LIMELIGHT_ADMIN_API_KEY",),
    "enable_rl": ("LIMELIGHT_ENABLE_RL", "VLLM_SERVER_DEV_MODE"),
    "enable_pickled_ipc_handles": (
        "LIMELIGHT_ENABLE_PICKLED_IPC_HANDLES", "VLLM_ALLOW_INSECURE_SERIALIZATION",
    ),
    "prefix_hash_seed": ("LIMELIGHT_PREFIX_HASH_SEED",),
    "beam_always_constrain_output": (
        "LIMELIGHT_BEAM_ALWAYS_CONSTRAIN_OUTPUT", "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
    ),
    "enforce_strict_tool_calling": (
        "LIMELIGHT_ENFORCE_STRICT_TOOL_CALLING", "VLLM_ENFORCE_STRICT_TOOL_CALLING",
    ),
}  # fmt: skip


def setting(default, help: str, *, aliases: tuple[str, ...] = ()):
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"help": help, "aliases": aliases})


def environment(name: str) -> str | None:
    """The value that the environment gives the setting `name`, ours before others' spelling."""
    return next((os.environ[key] for key in ENVIRONMENT.get(name, ()) if key in os.environ), None)


def without_none(hint):
    """The annotation that stands beside None, or `hint` itself where None is not allowed."""
    if NoneType not in get_args(hint):
        return hint
    (other,) = (option for option in get_args(hint) if option is not NoneType)
    return other


def check_choices(config: Any):
    """Of a dataclass, refuse a value outside a `Literal` field's list."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, hint = getattr(config, item.name), without_none(hints[item.name])
        unset = value is None and hint is not hints[item.name]
        if get_origin(hint) is Literal and value not in get_args(hint) and not unset:
            options = ", ".join(map(str, get_args(hint)))
            raise ValueError(f"{item.name} must be one of {options}; got {value!r}")


def check_at_least(config: object, **lowest: int):
    """Refuse a field that is no integer, or one below its lowest."""
    for name, low in lowest.items():
        value = getattr(config, name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not is_integer or value < low):
            raise ValueError(f"{name} must be an integer of at least {low}; got {value!r}")
