"""From a config to experts that ranks share: who holds which."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from limelight.config import EngineConfig
from limelight.parallel.expert_mesh import Backend, ExpertMesh
from limelight.parallel.expert_placement import ExpertPlacement, read_loads
from limelight.parallel.mesh import Mesh
from limelight.parallel.seat import Seat

if TYPE_CHECKING:
    from limelight.engine.startup import Resolved

logger = logging.getLogger(__name__)


def expert_mesh(config: EngineConfig, found: "Resolved", seat: Seat) -> ExpertMesh | None:
    """This rank's place among those that hold whole experts, before they are joined; None where
    experts are not spread. `ValueError` for what cannot be had."""
    if not config.enable_expert_parallel or seat.world_size == 1:
        _check_unset(config)
    if not config.enable_expert_parallel:
        return None
    if seat.world_size == 1:
        logger.warning("--enable-expert-parallel: one rank holds all experts; -tp or -dp has more")
        return None
    _check(config, found, seat)
    experts = found.shape.num_experts
    loads = read_loads(config.expert_placement or [], experts=experts)
    placement = ExpertPlacement.of(
        experts, seat.world_size, spare=config.num_redundant_experts, loads=loads
    )
    return ExpertMesh(
        seat.world_rank,
        seat.world_size,
        placement,
        Mesh(seat.rank, seat.size),
        backend=_backend(config),
        fp8=config.expert_dispatch_dtype == "fp8",
        records=config.expert_load_file is not None,
    )


def joined(experts: ExpertMesh | None, mesh: Mesh) -> ExpertMesh | None:
    """The same once all ranks are there; `mesh` are those with the same rows."""
    return None if experts is None else replace(experts, rows=mesh, group=dist.group.WORLD)


# What has a meaning where experts are spread alone, and its value where nobody has asked for it.
UNSET: dict[str, object] = {
    "moe_backend": "auto", "expert_dispatch_dtype": "auto", "expert_load_file": None,
    "expert_placement": None, "num_redundant_experts": 0,
}  # fmt: skip


def _check_unset(config: EngineConfig) -> None:
    """Refuse what would be forgotten."""
    for name, unset in UNSET.items():
        if getattr(config, name) != unset:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} has a meaning with --enable-expert-parallel and several ranks only"
            )


def _backend(config: EngineConfig) -> Backend:
    """The way to the experts; with --batch-invariant one that does not depend on other rows."""
    if not config.batch_invariant:
        return config.moe_backend
    if config.moe_backend == "allgather_reducescatter":
        raise ValueError(
            "--moe-backend allgather_reducescatter sums by rank, which is not batch-invariant; "
            "leave it out"
        )
    return "all2all" if config.moe_backend == "auto" else config.moe_backend


def _check(config: EngineConfig, found: "Resolved", seat: Seat) -> None:
    """Refuse what cannot be had, such as what CUDA graphs cannot hold."""
    for flag, given in (
        ("--weight-transfer-config", config.weight_transfer_config),
        ("--enable-lora", config.enable_lora),
    ):
        if given:
            raise ValueError(
                f"{flag} with --enable-expert-parallel is not supported yet: leave one of them out"
            )
    if found.device.type != "cuda" or config.enforce_eager:
        return
    if config.moe_backend.startswith("all2all"):
        raise ValueError(
            f"--moe-backend {config.moe_backend} counts rows on the host, which CUDA graphs "
            f"cannot; leave it out, or add --enforce-eager"
        )
    if found.drafter is not None and seat.data_size > 1:
        raise ValueError(
            "drafts together with experts shared over --data-parallel-size engines need "
            "--enforce-eager on a GPU; or leave drafts out: "
            "--speculative-config '{\"num_speculative_tokens\": 0}'"
        )
