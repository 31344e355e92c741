"""What a user may choose about LoRA adapters: checks, and the adapters to start with."""

import json
from collections.abc import Sequence

from limelight.types import LoRARequest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def check_room(*, max_rank: int, max_loras: int, max_cpu_loras: int | None, merges: bool) -> None:
    """`ValueError` for room that cannot be made."""
    if max_rank not in RANKS:
        ranks = ", ".join(map(str, RANKS))
        raise ValueError(f"max_lora_rank must be one of {ranks}; got {max_rank!r}")
    if max_cpu_loras is not None and max_cpu_loras < max_loras:
        raise ValueError(
            f"max_cpu_loras must be at least max_loras, {max_loras}; got {max_cpu_loras}"
        )
    if merges and max_loras > 1:
        raise ValueError("--merge-lora-experts serves one adapter at a time: --max-loras 1")


def read_modules(entries: Sequence[str]) -> list[LoRARequest]:
    """What --lora-modules says: name=folder, or JSON with name and path; ids go from 1 on."""
    adapters = [_adapter(text, i) for i, text in enumerate(entries, 1)]
    names = [adapter.lora_name for adapter in adapters]
    if len(set(names)) < len(names):
        raise ValueError(f"--lora-modules names an adapter twice: {', '.join(names)}")
    return adapters


def _adapter(text: str, adapter_id: int) -> LoRARequest:
    name, _, path = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
            name, path = given["name"], given["path"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"--lora-modules: {text!r:.80} has no name and path") from error
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise ValueError(f"--lora-modules takes name=folder, got {text!r:.80}")
    return LoRARequest(name, adapter_id, path)
