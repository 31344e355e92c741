"""What --weight-transfer-config may say."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """How new weights come from a trainer, which may take `seconds` for each part of it."""

    backend: Literal["nccl", "gloo", "ipc"] | None = None
    seconds: float = 300.0

    @classmethod
    def of(cls, given: dict[str, object], *, pickled: bool) -> "WeightTransfer":
        """`ValueError` for what --weight-transfer-config does not have."""
        flag = "--weight-transfer-config"
        for key in given:
            if key not in ("backend", "timeout"):
                raise ValueError(f"{flag} has no key {key!r}; it has backend, timeout (seconds)")
        backend, seconds = given.get("backend", "nccl" if given else None), given.get("timeout")
        if backend not in (None, "nccl", "gloo", "ipc"):
            raise ValueError(f"{flag}: backend must be nccl, gloo or ipc; got {backend!r}")
        if backend == "ipc" and not pickled:
            raise ValueError(f"{flag}: backend ipc needs --enable-pickled-ipc-handles")
        if seconds is None:
            return cls(backend)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 < seconds < 1e6
        ):
            raise ValueError(f"{flag}: timeout must be a number of seconds; got {seconds!r}")
        return cls(backend, float(seconds))
