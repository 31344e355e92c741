"""Where the tensors of a checkpoint go."""

from dataclasses import dataclass, replace

from limelight.models.dummy import Dummy
from limelight.ops.mxfp8 import BLOCK, MXFP8
from limelight.ops.weight import Weight
from limelight.quant.stored import SCALE


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes.

    The tensor has `shape`; `take` is the part that this rank holds and `into` the piece of a
    parameter that receives it. Routed experts are one tensor of all of them; where a rank holds
    whole ones, `experts` are those that `into` has, one after the other.
    """

    into: Weight
    shape: tuple[int, ...]
    take: tuple[slice, ...]
    dummy: Dummy
    experts: tuple[int, ...] | None = None


Targets = dict[str, Target]


def coded(targets: Targets) -> Targets:
    """Where codes and scales of MXFP8 go, which are tensors by themselves: codes by the name of
    the weight, and its scales by that and SCALE."""
    found: Targets = {}
    for name, target in targets.items():
        if not isinstance(target.into, MXFP8):
            continue
        *rows, columns = target.take
        take = (*rows, slice(columns.start // BLOCK, columns.stop // BLOCK))
        shape = (*target.shape[:-1], target.shape[-1] // BLOCK)
        found[name] = replace(target, into=target.into.codes)
        found[name + SCALE] = replace(target, into=target.into.scales, shape=shape, take=take)
    return found
