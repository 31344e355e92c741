"""The next token of each row of a step: by the logits alone, where a graph may do it, and behind
that log-probabilities, and the tokens of rows whose rules the host has to be asked for."""

import torch

from limelight.models.loader import Model
from limelight.ops import is_batch_invariant
from limelight.ops.pieces import Cuts
from limelight.ops.sample import sample
from limelight.parallel.collectives import from_first
from limelight.parallel.mesh import Mesh
from limelight.parallel.sampling import Share, sample_shares
from limelight.runner.inputs import StepTensors
from limelight.runner.launched import Judged, Launched, Outcome
from limelight.runner.sampler import Run, Sampler
from limelight.runner.transfers import sent

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
    shares: bool,
) -> Outcome:
    """Each row's token, which `last_tokens_S` gets as the last of its slot, and its best logit.

    With `shares` logits need not be gathered, which rows without cut-offs alone can do without.
    """
    into, head = (last_tokens_S, tensors.sample_slots_R), model.head
    numbers = (tensors.temperature_R, tensors.uniform_R)
    if shares and draws_shares(head.mesh, len(hidden_RD), hidden_RD.device):
        assert not cuts
        logits_RV, share = model.logit_share(hidden_RD), Share(head.mesh, head.first)
        token_R, best_R = sample_shares(
            logits_RV, *numbers, share.mesh, first=share.first, into=into
        )
        return Outcome(Judged(token_R[:, None], best_R), logits_RV, share)
    cut_offs = Cuts(tensors.top_k_R, tensors.top_p_R, tensors.min_p_R) if cuts else None
    logits_RV = model.logits(hidden_RD)
    token_R, best_R = sample(logits_RV, *numbers, cuts=cut_offs, into=into)
    return Outcome(Judged(token_R[:, None], best_R), logits_RV)


def finish(
    launched: Launched, outcome: Outcome, sampler: Sampler, last_tokens_S: torch.Tensor, mesh: Mesh
) -> None:
    """What is left to do with the logits of a step, whose rows are those of `launched.order`."""
    rules = [sampler.rules[grant.slot] for grant in launched.order]
    own = {r: rule for r, rule in enumerate(rules) if rule.on_device}
    launched.judged, launched.logprobs = outcome.judged, outcome.logprobs(own, sampler)
    asked = [r for r in range(len(rules)) if r not in own]
    if not asked:
        return
    grants = [launched.order[r] for r in asked]
    slots, runs = [grant.slot for grant in grants], [Run([])] * len(grants)
    if sampler.chooses:
        positions = [grant.start + grant.num_tokens for grant in grants]
        runs = sampler.choose(outcome.logits_RV, slots, positions, rows=asked)
    launched.runs = dict(zip(slots, runs, strict=True))
    chosen = [run.token_ids[0] if run.token_ids else 0 for run in runs]
    chosen_P, slots_P = (sent(x, torch.int64, last_tokens_S.device) for x in (chosen, slots))
    last_tokens_S[slots_P] = from_first(chosen_P, mesh)
