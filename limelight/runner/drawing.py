"""The next token of each row of a step: by the logits alone, where a graph may do it, and behind
that log-probabilities, and the tokens of rows whose rules the host has to be asked for."""

import torch

from limelight.models.loader import Model
from limelight.ops.pieces import Cuts
from limelight.parallel.collectives import from_first
from limelight.parallel.mesh import Mesh
from limelight.parallel.sampling import sample_share
from limelight.runner.inputs import StepTensors
from limelight.runner.launched import Judged, Launched, Outcome
from limelight.runner.sampler import Sampler
from limelight.runner.transfers import sent


def draw(
    model: Model,
    hidden_RD: torch.Tensor,
    tensors: StepTensors,
    last_tokens_S: torch.Tensor,
    *,
    cuts: bool,
) -> Outcome:
    """Each row's token, which `last_tokens_S` gets as the last of its slot, and its best logit."""
    cut_offs = Cuts(tensors.top_k_R, tensors.top_p_R, tensors.min_p_R) if cuts else None
    logits_RV = model.logits(hidden_RD)
    token_R, best_R = sample_share(
        logits_RV, tensors.temperature_R, tensors.uniform_R, model.head.share,
        cuts=cut_offs, into=(last_tokens_S, tensors.sample_slots_R),
    )  # fmt: skip
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
    slots = [grant.slot for grant in grants]
    positions = [grant.start + grant.num_tokens for grant in grants]
    runs = sampler.choose(outcome.logits_RV, slots, positions, rows=asked)
    launched.runs = dict(zip(slots, runs, strict=True))
    chosen = [run.token_ids[0] if run.token_ids else 0 for run in runs]
    chosen_P, slots_P = (sent(x, torch.int64, last_tokens_S.device) for x in (chosen, slots))
    if any(rules[r].guided for r in asked):
        # What a guide refuses rank 0 alone knows.
        chosen_P = from_first(chosen_P, mesh)
    last_tokens_S[slots_P] = chosen_P
