"""The next token of each row of a step, where the device chooses by the logits alone."""

import torch

from limelight.models.loader import Model
from limelight.ops import is_batch_invariant
from limelight.ops.pieces import Cuts
from limelight.ops.sample import sample
from limelight.parallel.mesh import Mesh
from limelight.parallel.sampling import sample_shares
from limelight.runner.inputs import StepTensors
from limelight.runner.launched import Judged

# Of fewer rows GPUs gather all logits sooner than they tell each other what they have of them. Not
# measured yet.
LEAST_SHARED_ROWS = 16


def draws_shares(mesh: Mesh, rows: int, device: torch.device) -> bool:
    """Whether so many rows without cut-offs are drawn without gathering their logits."""
    if is_batch_invariant():
        # Sums in another order, where a row has others beside it that have cut-offs.
        return False
    return mesh.group is not None and rows >= (LEAST_SHARED_ROWS if device.type == "cuda" else 1)


def draw(
    model: Model,
    hidden_RD: torch.Tensor,
    tensors: StepTensors,
    last_tokens_S: torch.Tensor,
    *,
    cuts: bool,
) -> Judged:
    """Each row's token, which `last_tokens_S` gets as the last of its slot, and its best logit."""
    into, head = (last_tokens_S, tensors.sample_slots_R), model.head
    numbers = (tensors.temperature_R, tensors.uniform_R)
    if not cuts and draws_shares(head.mesh, len(hidden_RD), hidden_RD.device):
        logits_RS = model.logit_share(hidden_RD)
        token_R, best_R = sample_shares(logits_RS, *numbers, head.mesh, first=head.first, into=into)
    else:
        cut_offs = Cuts(tensors.top_k_R, tensors.top_p_R, tensors.min_p_R) if cuts else None
        token_R, best_R = sample(model.logits(hidden_RD), *numbers, cuts=cut_offs, into=into)
    return Judged(token_R[:, None], best_R)
