"""Log-probabilities of prompts, where requests ask for them."""

import torch

from limelight.models.loader import Model
from limelight.runner.logprobs import token_logprobs
from limelight.steps import Grant
from limelight.types import Request, TokenLogprobs

# They need logits of every prompt token; this many rows exist at once.
LOGIT_ROWS_AT_ONCE = 128


def tells_prompts(requests: list[tuple[Grant, Request]]) -> bool:
    """Whether any grant's rows are asked for log-probabilities of a prompt."""
    asked = [one for one in requests if one[1].params.prompt_logprobs is not None]
    return any(grant.start < len(request.prompt_token_ids) for grant, request in asked)


def prompt_logprobs(
    model: Model, requests: list[tuple[Grant, Request]], hidden_TD: torch.Tensor
) -> dict[int, list[TokenLogprobs]]:
    """By slot, of the prompt tokens at start + 1 .. start + num_tokens, where asked for."""
    reports: dict[int, list[TokenLogprobs]] = {}
    # Of drafts fewer may have been verified; their sequences come first.
    end = len(hidden_TD) - sum(grant.num_tokens for grant, _ in requests)
    for grant, request in requests:
        begin, end = end, end + grant.num_tokens
        wanted = request.params.prompt_logprobs
        if wanted is None:
            continue
        following = request.prompt_token_ids[grant.start + 1 :][: grant.num_tokens]
        rows = reports.setdefault(grant.slot, [])
        for at in range(0, len(following), LOGIT_ROWS_AT_ONCE):
            ids = following[at : at + LOGIT_ROWS_AT_ONCE]
            logits_RV = model.logits(hidden_TD[begin + at : begin + at + len(ids)])
            rows += token_logprobs(logits_RV, ids, wanted, model.head.share)
    return reports
