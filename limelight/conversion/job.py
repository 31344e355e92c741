"""Reading and quantizing the tensors of one checkpoint, with an account of what became of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from limelight.conversion.shards import NAMES
from limelight.conversion.sources import Source
from limelight.engine.memory import KINDS
from limelight.ops.mxfp8 import BLOCK, CODES, MXFP8, dequantize, quantize_into
from limelight.quant.nvfp4 import Deviation, Quantized, global_scale, quantize_matrix
from limelight.quant.stored import Packing

PACKED = get_args(Packing)
# Small tensors that no format packs are kinds of their own.
SMALL = {"norm": "norms", "softmax_offset": "sinks", "gate_bias": "gate biases"}


def _kind(name: str) -> str:
    small = (kind for part, kind in SMALL.items() if part in name)
    return next(small, None) or next(kind for kind, pattern in KINDS if pattern.search(name))


@dataclass(slots=True)
class Row:
    """What became of the tensors of one kind that are now in one format."""

    tensors: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    deviation: Deviation = Deviation()


class Job:
    """Reads and quantizes the tensors of the checkpoint in `folder`, and keeps account of them."""

    def __init__(self, folder: Path, device: torch.device, advance: Callable[[int], None]):
        self.folder, self.device, self.advance = folder, device, advance
        self.rows: dict[tuple[str, str], Row] = {}

    def quantized(self, sources: list[Source]) -> list[Quantized]:
        """Tensors in NVFP4 under one global scale."""
        weights = [source.read(self.device, source.dtype) for source in sources]
        scales = []
        for source, weight in zip(sources, weights, strict=True):
            try:
                scales.append(global_scale(weight))
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
        scale = torch.stack(scales).amax()
        results = []
        for source, weight in zip(sources, weights, strict=True):
            result = quantize_matrix(weight, scale)
            nbytes = result.codes.nbytes + result.scales.nbytes + result.scale.nbytes
            self._note(source, "NVFP4", nbytes, result.deviation)
            results.append(result)
        return results

    def mxfp8(self, source: Source) -> MXFP8:
        """A tensor in MXFP8."""
        weight = source.read(self.device, torch.float32)
        held = MXFP8(
            torch.empty(weight.shape, dtype=CODES, device=self.device),
            torch.empty(*weight.shape[:-1], weight.shape[-1] // BLOCK, dtype=torch.uint8,
                        device=self.device),
        )  # fmt: skip
        try:
            quantize_into(held, weight)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        away = dequantize(held, dtype=torch.float32).sub_(weight)
        squares = [float(one.double().square().sum()) for one in (weight, away)]
        deviation = Deviation(squares[0], squares[1], float(away.abs().max()))
        self._note(source, "MXFP8", held.nbytes, deviation)
        return held

    def kept(self, source: Source, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a type that holds all its values."""
        tensor = source.read(torch.device("cpu"), dtype)
        self._note(source, NAMES[dtype], tensor.nbytes, Deviation())
        return tensor

    def _note(self, source: Source, form: str, nbytes: int, deviation: Deviation):
        row = self.rows.setdefault((_kind(source.name), form), Row())
        row.tensors += 1
        row.bytes_before += source.nbytes
        row.bytes_after += nbytes
        row.deviation += deviation
        self.advance(source.nbytes)

    def report(self) -> list[dict[str, object]]:
        """A row for each kind of tensor and format; packed ones with how far from what was."""
        return [
            {
                "kind": kind,
                "format": form,
                "tensors": row.tensors,
                "bytes_before": row.bytes_before,
                "bytes_after": row.bytes_after,
                "relative_rms_error": row.deviation.relative if form in PACKED else None,
                "largest_error": row.deviation.largest if form in PACKED else None,
            }
            for (kind, form), row in self.rows.items()
        ]
