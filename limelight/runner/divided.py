"""The layers of a model whose experts are on several ranks, as its runner sees them."""

import torch

from limelight.models.layers import Experts
from limelight.models.loader import Model
from limelight.parallel.expert_mesh import MOST_GATHERED
from limelight.steps import StepPlan


class DividedLayers:
    """None, where a rank has all experts or a part of each."""

    def __init__(self, model: Model, device: torch.device):
        self.layers = [
            module
            for module in model.modules()
            if isinstance(module, Experts) and module.divided is not None
        ]
        self.count = model.config.experts_per_token
        divided = [layer.divided for layer in self.layers if layer.divided is not None]
        self.mesh = divided[0].mesh if divided else None
        self.counts = {one.layer: one.counts_E for one in divided}
        if self.mesh is not None and self.mesh.records:
            self.mesh.pace.valid_1 = torch.zeros(1, dtype=torch.int64, device=device)

    def pace(self, plan: StepPlan) -> None:
        """Tell the layers what was agreed on for a step, before it runs."""
        if self.mesh is None:
            return
        self.mesh.pace.most = None if plan.together is None else max(plan.together.rows)
        if self.mesh.pace.valid_1 is not None:
            self.mesh.pace.valid_1.fill_(plan.num_rows)

    def serve(self) -> None:
        """Let the experts work for rows of other ranks alone."""
        for layer in self.layers:
            layer.serve(self.count)

    def most_rows_of_a_graph(self, rows: int) -> int:
        """Of so many that a step may have: in a graph all ranks get all rows."""
        if self.mesh is None or self.mesh.backend != "auto":
            return rows
        return min(rows, MOST_GATHERED * self.mesh.rows.size)

    def loads(self) -> dict[int, list[int]]:
        """How many tokens of this engine each expert of each layer got since the last `forget`."""
        return {layer: counts_E.tolist() for layer, counts_E in self.counts.items()}

    def forget(self) -> None:
        """Count from here on."""
        for counts_E in self.counts.values():
            counts_E.zero_()
