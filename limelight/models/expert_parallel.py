"""A layer's experts where each rank holds some of them whole: rows go there, outputs come back.

Two ways, by the most rows that any rank brings (`parallel/expert_mesh.py`). For few, every rank
gets all rows and routes, and sums over ranks of what their experts add come back
(`allgather_reducescatter`): all sizes are known from the number of rows, so a CUDA graph can hold
it. For many, each row goes only where its experts are, and each expert's output comes back to be
summed in the router's order, as one rank does it (`all2all`); in chunks of which one travels while
the experts are at work on another (`all2all_pipelined`). A kernel that sends, multiplies and
returns tile by tile would take the place of `_exchanged`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from limelight.ops import linear
from limelight.ops.expert_pairs import expert_pairs, unpack_once
from limelight.ops.placed_sum import placed_sum
from limelight.ops.weight import Weight
from limelight.parallel import dispatch
from limelight.parallel.expert_mesh import ExpertMesh
from limelight.parallel.row_codes import decode_rows, encode_rows

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DividedExperts:
    """The way to one layer's experts. Every rank of the mesh must call it in every step."""

    def __init__(self, mesh: ExpertMesh, layer: int, rows_0D: torch.Tensor):
        """`rows_0D` has the type and place of rows."""
        self.mesh, self.layer, self.rows_0D = mesh, layer, rows_0D
        self.choices_EC = mesh.choices(layer, rows_0D.device)
        counts = len(self.choices_EC) if mesh.records else 0
        # How many rows each expert has got of those of this data rank.
        self.counts_E = torch.zeros(counts, dtype=torch.int64, device=rows_0D.device)

    def moe(
        self,
        y_TD: torch.Tensor,
        gate_up_SGD: Weight,
        down_SDF: Weight,
        weights_TN: torch.Tensor,
        ids_TN: torch.Tensor,
        shared_gate_up_GD: Weight | None,
        shared_down_DF: Weight | None,
        *,
        fp32: bool,
        scale: float,
    ) -> torch.Tensor:
        """As `ops.experts.moe` of all experts, with the matrices of those in this rank's slots."""
        mesh, rows = self.mesh, len(y_TD)
        if mesh.records:
            self._record(ids_TN)
        part = mesh.part(rows)
        y_XD, weights_XN = y_TD[part], weights_TN[part]
        slots_XN = self._slots(ids_TN[part], first=part.start)

        def computing(chunks: list[int]) -> Compute:
            gate_up = unpack_once(y_XD, gate_up_SGD, chunks)
            down = unpack_once(y_XD, down_SDF, chunks)
            return lambda y_PD, ids_P: expert_pairs(y_PD, gate_up, down, ids_P, fp32=fp32)

        def added() -> torch.Tensor | None:
            if shared_gate_up_GD is None or shared_down_DF is None or not len(y_XD):
                return None
            inner_XF = linear.swiglu_project(y_XD, shared_gate_up_GD, fp32=fp32)
            return linear.project(inner_XF, shared_down_DF)

        run = self._gathered if mesh.gathers(mesh.capacity(rows)) else self._exchanged
        out_XD = run(y_XD, slots_XN, weights_XN, mesh.capacity(rows), computing, added, scale)
        return dispatch.join_parts(out_XD, rows, mesh)

    def _slots(self, ids_XN: torch.Tensor, *, first: int) -> torch.Tensor:
        """Each pair's slot, counted over all ranks; copies of an expert take rows in turn."""
        copies = self.choices_EC.shape[1]
        if copies == 1:
            return self.choices_EC[:, 0][ids_XN]
        turn_X = torch.arange(first, first + len(ids_XN), device=ids_XN.device) % copies
        return self.choices_EC[ids_XN, turn_X[:, None]]

    def _gathered(
        self,
        y_XD: torch.Tensor,
        slots_XN: torch.Tensor,
        weights_XN: torch.Tensor,
        capacity: int,
        computing: Callable[[list[int]], Compute],
        added: Callable[[], torch.Tensor | None],
        scale: float,
    ) -> torch.Tensor:
        mesh, (rows, count) = self.mesh, slots_XN.shape
        missing = (0, 0, 0, capacity - rows)
        routes = torch.cat((slots_XN.int(), weights_XN.contiguous().view(torch.int32)), dim=1)
        routes = dispatch.gather_rows(F.pad(routes, missing, value=-1), mesh)
        sent = encode_rows(F.pad(y_XD, missing), fp8=mesh.fp8)
        all_YD = decode_rows(dispatch.gather_rows(sent, mesh), y_XD.shape[1], y_XD.dtype)
        slots_YN = routes[:, :count].long() - mesh.rank * mesh.placement.slots
        here_YN = (slots_YN >= 0) & (slots_YN < mesh.placement.slots)
        ids_P = torch.where(here_YN, slots_YN, mesh.placement.slots).flatten()
        compute = computing([len(ids_P)])
        out_PD = compute(all_YD.repeat_interleave(count, dim=0), ids_P)
        places_YN = torch.arange(len(ids_P), device=ids_P.device).view_as(here_YN)
        places_YN = torch.where(here_YN, places_YN, -1)
        weights_YN = routes[:, count:].contiguous().view(torch.float32)
        sums_YD = placed_sum(out_PD, places_YN, weights_YN, None, dtype=torch.float32)
        out_XD = dispatch.scatter_sums(sums_YD, mesh)[:rows].to(y_XD.dtype)
        out_XD = out_XD if scale == 1.0 else out_XD * scale
        added_XD = added()
        return out_XD if added_XD is None else out_XD + added_XD

    def _exchanged(
        self,
        y_XD: torch.Tensor,
        slots_XN: torch.Tensor,
        weights_XN: torch.Tensor,
        capacity: int,
        computing: Callable[[list[int]], Compute],
        added: Callable[[], torch.Tensor | None],
        scale: float,
    ) -> torch.Tensor:
        mesh, (rows, count) = self.mesh, slots_XN.shape
        chunks = mesh.chunks(capacity)
        pieces = [slice(rows * i // chunks, rows * (i + 1) // chunks) for i in range(chunks)]
        order = [dispatch.Sorted(slots_XN[piece], mesh) for piece in pieces]
        counts = dispatch.agree_on_counts(order, mesh)
        arriving = dispatch.dispatch(y_XD[pieces[0]], order[0], counts[0], mesh)
        added_XD, compute = added(), computing([sum(one.pairs_in) for one in counts])
        out: list[torch.Tensor] = []

        def sum_up(i: int, returning: dispatch.Moving) -> None:
            beside = None if added_XD is None else added_XD[pieces[i]]
            places_XN, weights = order[i].places(count), weights_XN[pieces[i]]
            back_PD = returning.take()
            out.append(
                placed_sum(back_PD, places_XN, weights, beside, scale=scale, dtype=y_XD.dtype)
            )

        returning: dispatch.Moving | None = None
        for i in range(chunks):
            # The next chunk travels while this one is computed, and this one back during the next.
            now = arriving
            if i + 1 < chunks:
                piece = pieces[i + 1]
                arriving = dispatch.dispatch(y_XD[piece], order[i + 1], counts[i + 1], mesh)
            last, returning = returning, dispatch.send_back(compute(*now.take()), counts[i], mesh)
            if last is not None:
                sum_up(i - 1, last)
        assert returning is not None
        sum_up(chunks - 1, returning)
        return torch.cat(out)

    def _record(self, ids_TN: torch.Tensor) -> None:
        ones_TN = torch.ones_like(ids_TN)
        if self.mesh.pace.valid_1 is not None:
            rows_T = torch.arange(len(ids_TN), device=ids_TN.device)
            ones_TN = ones_TN * (rows_T < self.mesh.pace.valid_1)[:, None]
        self.counts_E.scatter_add_(0, ids_TN.flatten(), ones_TN.flatten())
