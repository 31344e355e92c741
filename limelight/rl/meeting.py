"""Where a trainer waits, and which rank of its group this rank of an engine is."""

import base64
import binascii
from dataclasses import dataclass

from limelight.rl.nccl import ID_BYTES

BUFFER_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """An `init_info`: an address or a unique id, this rank's place, and how tensors are packed.

    Packed tensors lie one behind the other in broadcasts of a little more than `buffer_bytes`.
    """

    host: str | None
    port: int | None
    unique_id: bytes | None
    rank: int
    world_size: int
    packed: bool
    buffer_bytes: int

    @classmethod
    def read(cls, info: dict[str, object], *, rank_in_engines: int) -> "Meeting":
        """`ValueError` says what is wrong; `rank_in_engines` counts all ranks of all engines."""
        host, port, id = (info.get(key) for key in KEYS)
        if id is not None and (host is not None or port is not None):
            raise ValueError("give nccl_unique_id_b64, or master_address and master_port, not both")
        if id is None and not (isinstance(host, str) and host):
            raise ValueError(f"init_info.master_address must be an address; got {host!r:.50}")
        world_size = _integer(info, "world_size", None, 2)
        rank = _integer(info, "rank_offset", None, 1) + rank_in_engines
        if rank >= world_size:
            raise ValueError(
                f"world_size {world_size} leaves no place for rank {rank}, which is this engine's: "
                f"it counts the trainer and what GET /get_world_size tells"
            )
        packed = info.get("packed", False)
        if not isinstance(packed, bool):
            raise ValueError(f"init_info.packed must be true or false; got {packed!r:.50}")
        return cls(
            host=str(host) if id is None else None,
            port=_integer(info, "master_port", None, 1, 65535) if id is None else None,
            unique_id=None if id is None else _unique_id(id),
            rank=rank,
            world_size=world_size,
            packed=packed,
            buffer_bytes=_integer(info, "packed_buffer_size_bytes", BUFFER_BYTES, 1),
        )


KEYS = ("master_address", "master_port", "nccl_unique_id_b64")


def _integer(
    info: dict[str, object], key: str, default: int | None, low: int, high: int = 2**63
) -> int:
    value = info.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"init_info.{key} must be an integer of at least {low}; got {value!r:.50}")
    return value


def _unique_id(text: object) -> bytes:
    try:
        id = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error as error:
        raise ValueError(f"init_info.nccl_unique_id_b64 is not base64: {error}") from error
    if len(id) != ID_BYTES:
        raise ValueError(f"init_info.nccl_unique_id_b64 must be {ID_BYTES} bytes in base64")
    return id
