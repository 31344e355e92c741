"""Which drafts of each sequence stand, and the token behind them: exact for any drafter.

    greedy:   draft d stands while it is argmax p;  else the argmax comes instead
    drawn:    d stands while it is the token that the sampler draws without drafts;  else that one
              comes instead
    sampled:  d, drawn from q, stands if u * q(d) < p(d);  else a token of max(p - q, 0) comes
              instead;  behind the last draft comes one of p itself

p is the target's distribution under the sequence's temperature and cut-offs. q is the softmax of
K candidates' scores at the same temperature and 0 for every other token. A draft that q cannot have
given is refused without a look at p, and p itself is drawn from: since that holds for any p,
nothing is lost.

A drafter's best token stands with the chance p(d) both ways, but what is `drawn` is also, token by
token, the text without drafts: how many were verified, and when, leaves no trace. A drafter that
draws is accepted more often by the last way, with the chance sum_d min(p(d), q(d)).

Here N is the most drafts of a sequence, Q = N + 1 tokens, K the candidates of a draft, and R all
rows: 1 + n_b for each of B sequences, packed. Probabilities are FP32, what is compared and summed
FP64. Nothing waits for the device, and no shape depends on what was drafted.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import judge, op, pdl, pieces
from limelight.ops.noise import ACCEPT, PLAIN, RESIDUAL, number_of, uniform
from limelight.ops.pieces import Cuts, sequence_of
from limelight.ops.sample import GREEDY_BELOW, Places, draw, invert, probabilities

NOTHING = -1  # in the place of a draft or a token


@dataclass(frozen=True, slots=True)
class Proposals:
    """What each draft was drawn from: scores of its candidates, just as the drafter drew."""

    ids_BNK: torch.Tensor  # int64
    scores_BNK: torch.Tensor  # FP32, of distinct candidates


@dataclass(frozen=True, slots=True)
class Verified:
    """`tokens_BQ` holds accepted + 1 tokens, then NOTHING; all NOTHING for a sequence without rows.

    `best_B` is the largest logit where the last of them stands: NaN if the logits there are not
    numbers, -inf if none is allowed, and then that token means nothing; 0 without rows.
    """

    accepted_B: torch.Tensor  # int64
    tokens_BQ: torch.Tensor  # int64
    best_B: torch.Tensor  # FP32


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts as the rows see them: `real_BN` excludes placeholders and what is not verified."""

    ids_BN: torch.Tensor  # inside the vocabulary also where they are not real
    real_BN: torch.Tensor
    rows_BQ: torch.Tensor  # the row that judges draft j, and the one behind the last


def draft_probs(scores_XK: torch.Tensor, temperature_X: torch.Tensor) -> torch.Tensor:
    """q over the candidates, FP32 [..., K]: drafts are drawn from this and judged by this.

    Scores that are not finite are impossible; if all are, the first candidate is certain. Below
    `GREEDY_BELOW` the first of the best is.
    """
    scores_XK = scores_XK.masked_fill(~scores_XK.isfinite(), float("-inf"))
    best_X1 = scores_XK.max(dim=-1, keepdim=True).values
    at_K = torch.arange(scores_XK.shape[-1], device=scores_XK.device)
    first_X1 = at_K.masked_fill(scores_XK < best_X1, scores_XK.shape[-1]).amin(-1, keepdim=True)
    warm_X1 = (temperature_X >= GREEDY_BELOW)[..., None] & (best_X1 > float("-inf"))
    warmth_X1 = torch.where(warm_X1, temperature_X[..., None], 1.0)
    probs_XK = torch.softmax((scores_XK - best_X1) / warmth_X1, dim=-1)
    return torch.where(warm_X1, probs_XK, (at_K == first_X1).float())


def packed_rows(starts_B: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each packed row and its place there, int64 [R]; `starts_B` is [B + 1].

    Rows behind the last sequence count as its own.
    """
    at_R = torch.arange(num_rows, device=starts_B.device)
    sequence_R = torch.searchsorted(starts_B[1:].long().contiguous(), at_R, right=True)
    sequence_R = sequence_R.clamp(max=len(starts_B) - 2)
    return sequence_R, at_R - starts_B.long()[sequence_R]


def verify_greedy_reference(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    *,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """Where every sequence takes the likeliest token; `slots_B` as in `verify`."""
    best_R, token_R = logits_RV.max(dim=-1)
    return verify_tokens_reference(
        token_R, best_R, starts_B, drafts_BN, vocabulary=logits_RV.shape[1], slots_B=slots_B
    )


def verify_tokens_reference(
    token_R: torch.Tensor,
    best_R: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    *,
    vocabulary: int,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """Where each row's token (int64) and best logit are known: drafts stand while they are it."""
    drafts = read_drafts(starts_B, of_slots(drafts_BN, slots_B), len(token_R), vocabulary)
    accepted_B = prefix(matches(drafts, best_R, token_R))
    last_B = at_each(drafts.rows_BQ, accepted_B)
    return verified(drafts, starts_B, accepted_B, token_R[last_B], best_R[last_B])


def verify_by_odds_reference(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    odds_BN: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """As `verify`, but each draft stands by its log odds alone, and the likeliest token follows."""
    shape = logits_RV.shape
    drafts, accepted_B = _by_odds(shape, starts_B, drafts_BN, odds_BN, seed_B, position_B, slots_B)
    best_B, token_B = logits_RV[at_each(drafts.rows_BQ, accepted_B)].max(dim=-1)
    return verified(drafts, starts_B, accepted_B, token_B, best_B)


def verify_tokens_by_odds_reference(
    token_R: torch.Tensor,
    best_R: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    odds_BN: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    vocabulary: int,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """The same where each row's likeliest token and its logit are known."""
    shape = (len(token_R), vocabulary)
    drafts, accepted_B = _by_odds(shape, starts_B, drafts_BN, odds_BN, seed_B, position_B, slots_B)
    last_B = at_each(drafts.rows_BQ, accepted_B)
    return verified(drafts, starts_B, accepted_B, token_R[last_B], best_R[last_B])


def _by_odds(
    shape: tuple[int, int] | torch.Size,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    odds_BN: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    slots_B: torch.Tensor | None,
) -> tuple[Drafts, torch.Tensor]:
    drafts_BN, odds_BN = of_slots(drafts_BN, slots_B), of_slots(odds_BN, slots_B)
    drafts = read_drafts(starts_B, drafts_BN, *shape)
    at_BN = position_B.long()[:, None] + torch.arange(drafts_BN.shape[1], device=seed_B.device)
    u_BN = uniform(seed_B[:, None], at_BN, stream=ACCEPT)
    return drafts, prefix(drafts.real_BN & (u_BN < torch.sigmoid(odds_BN.double())))


def verify_drawn_reference(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    temperature_B: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    cuts: Cuts | None = None,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """By the sampler's own numbers; the arguments are those of `verify`."""
    best_R, token_R = logits_RV.max(dim=-1)
    temperature_R, uniform_R, each_R = each_row_reference(
        starts_B, temperature_B, seed_B, position_B, cuts=cuts, rows=len(logits_RV)
    )
    drawn_R = invert(probabilities(logits_RV, temperature_R, each_R), uniform_R)
    token_R = torch.where(temperature_R >= GREEDY_BELOW, drawn_R, token_R)
    return verify_tokens_reference(
        token_R, best_R, starts_B, drafts_BN, vocabulary=logits_RV.shape[1], slots_B=slots_B
    )


def each_row_reference(
    starts_B: torch.Tensor,
    temperature_B: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    cuts: Cuts | None,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, Cuts | None]:
    """Of each packed row its sequence's temperature, its own number of PLAIN, FP32 [R] both, and
    its sequence's cut-offs; rows behind the last sequence count as its own."""
    sequence_R, place_R = packed_rows(starts_B, rows)
    positions_R = position_B.long()[sequence_R] + place_R
    uniform_R = uniform(seed_B[sequence_R], positions_R, stream=PLAIN).float()
    each_R = None if cuts is None else Cuts(*(x_B[sequence_R] for x_B in cuts.arguments))
    return temperature_B[sequence_R], uniform_R, each_R


def verify_by(
    proposals: Proposals | None,
    *arguments: torch.Tensor,
    cuts: Cuts | None,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """`verify` of drafts that were drawn, or `verify_drawn` where they are the drafter's best."""
    if proposals is None:
        return verify_drawn(*arguments, cuts=cuts, slots_B=slots_B)
    return verify(*arguments, proposals=proposals, cuts=cuts, slots_B=slots_B)


def verify_reference(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    temperature_B: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    proposals: Proposals,
    cuts: Cuts | None = None,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """Rows of FP32 logits, processed but for temperature and cut-offs, against int64 drafts.

    Row i of sequence b is packed at `starts_B[b]` + i and stands for the token at `position_B[b]`
    + i, after i drafts. `starts_B` is [B + 1] and rises; drafts beyond a sequence's rows are not
    looked at, nor rows behind the last sequence, and NOTHING is never accepted. Where nothing is
    drafted the token is the sampler's own. With `slots_B` drafts and proposals are those of slots,
    and sequence b has the ones in `slots_B[b]`.
    """
    drafts_BN = of_slots(drafts_BN, slots_B)
    ids_BNK, scores_BNK = (of_slots(x, slots_B) for x in (proposals.ids_BNK, proposals.scores_BNK))
    best_R, token_R = logits_RV.max(dim=-1)
    drafts = read_drafts(starts_B, drafts_BN, *logits_RV.shape)
    sequence_R, _ = packed_rows(starts_B, len(logits_RV))
    each_R = None if cuts is None else Cuts(*(x_B[sequence_R] for x_B in cuts.arguments))
    probs_RV = probabilities(logits_RV, temperature_B[sequence_R], each_R)
    total_R = probs_RV.sum(dim=-1, dtype=torch.float64)
    candidates = candidates_of(Proposals(ids_BNK, scores_BNK), temperature_B, logits_RV.shape[1])
    at_BQ = position_B.long()[:, None] + torch.arange(drafts_BN.shape[1] + 1, device=seed_B.device)
    u_BN = uniform(seed_B[:, None], at_BQ[:, :-1], stream=ACCEPT)
    possible_BN, stands_BN = _stand(drafts, candidates, probs_RV, total_R, u_BN)
    greedy_B = temperature_B < GREEDY_BELOW
    stands_BN = torch.where(greedy_B[:, None], matches(drafts, best_R, token_R), stands_BN)
    accepted_B = prefix(stands_BN)
    last_B = at_each(drafts.rows_BQ, accepted_B)
    refused_B = at_each(torch.nn.functional.pad(possible_BN, (0, 1)), accepted_B)
    weights_BV = _weights(probs_RV[last_B], total_R[last_B], candidates, accepted_B, refused_B)
    residual_B, plain_B = (
        uniform(seed_B, at_each(at_BQ, accepted_B), stream=use) for use in (RESIDUAL, PLAIN)
    )
    number_B = torch.where(refused_B, residual_B, plain_B).float()
    final_B = torch.where(greedy_B, token_R[last_B], invert(weights_BV, number_B))
    return verified(drafts, starts_B, accepted_B, final_B, best_R[last_B])


def of_slots(x_SX: torch.Tensor, slots_B: torch.Tensor | None) -> torch.Tensor:
    return x_SX if slots_B is None else x_SX[slots_B.long()]


def read_drafts(
    starts_B: torch.Tensor, drafts_BN: torch.Tensor, rows: int, vocabulary: int
) -> Drafts:
    num_drafts = drafts_BN.shape[1]
    at_Q = torch.arange(num_drafts + 1, device=drafts_BN.device)
    verified_BN = at_Q[1:] < starts_B.long().diff()[:, None]
    rows_BQ = (starts_B[:-1].long()[:, None] + at_Q).clamp(max=rows - 1)
    real_BN = verified_BN & (drafts_BN >= 0) & (drafts_BN < vocabulary)
    return Drafts(drafts_BN.clamp(0, vocabulary - 1), real_BN, rows_BQ)


def matches(drafts: Drafts, best_R: torch.Tensor, token_R: torch.Tensor) -> torch.Tensor:
    """Whether each draft is its row's best token, where any is allowed."""
    rows_BN = drafts.rows_BQ[:, :-1]
    allowed_BN = best_R[rows_BN] > float("-inf")
    return drafts.real_BN & allowed_BN & (token_R[rows_BN] == drafts.ids_BN)


def _stand(
    drafts: Drafts,
    candidates: tuple[torch.Tensor, torch.Tensor],
    probs_RV: torch.Tensor,
    total_R: torch.Tensor,
    u_BN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether q can have given each draft, and whether the draft then stands."""
    ids_BNK, q_BNK = candidates
    q_BN = torch.where(ids_BNK == drafts.ids_BN[..., None], q_BNK, 0.0).sum(dim=-1)
    possible_BN = drafts.real_BN & (q_BN > 0)
    rows_BN = drafts.rows_BQ[:, :-1]
    p_BN = probs_RV[rows_BN, drafts.ids_BN].double() / total_R[rows_BN]
    return possible_BN, possible_BN & (u_BN * q_BN < p_BN)


def prefix(stands_BN: torch.Tensor) -> torch.Tensor:
    return stands_BN.long().cumprod(dim=-1).sum(dim=-1)


def at_each(of_BX: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    return of_BX.gather(1, index_B[:, None])[:, 0]


def candidates_of(
    proposals: Proposals, temperature_B: torch.Tensor, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and q of each draft's candidates [B, N, K], FP64."""
    ids_BNK, scores_BNK = proposals.ids_BNK, proposals.scores_BNK
    temperature_BN = temperature_B[:, None].expand(scores_BNK.shape[:2])
    q_BNK = draft_probs(scores_BNK, temperature_BN).double()
    inside_BNK = (ids_BNK >= 0) & (ids_BNK < vocabulary)
    q_BNK = torch.where(inside_BNK, q_BNK, 0.0)
    # The draft was one of these, whatever else might have come.
    q_BNK = q_BNK / q_BNK.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return ids_BNK.clamp(0, vocabulary - 1), q_BNK


def _weights(
    probs_BV: torch.Tensor,
    total_B: torch.Tensor,
    candidates: tuple[torch.Tensor, torch.Tensor],
    accepted_B: torch.Tensor,
    refused_B: torch.Tensor,
) -> torch.Tensor:
    """What the last token is drawn by, FP64: max(p - q, 0) in a refused draft's place, else p."""
    ids_BNK, q_BNK = candidates
    weights_BV = probs_BV.double()
    if ids_BNK.shape[1] == 0:
        return weights_BV
    at_B11 = accepted_B.clamp(max=ids_BNK.shape[1] - 1)[:, None, None]
    at_B1K = at_B11.expand(-1, -1, ids_BNK.shape[2])
    ids_BK, q_BK = (x_BNK.gather(1, at_B1K)[:, 0] for x_BNK in (ids_BNK, q_BNK))
    residual_BV = (weights_BV / total_B[:, None]).scatter_add(1, ids_BK, -q_BK).clamp(min=0)
    # Rounding can leave nothing where p and q are the same.
    left_B = refused_B & (residual_BV.sum(dim=-1) > 0)
    return torch.where(left_B[:, None], residual_BV, weights_BV)


def verified(
    drafts: Drafts,
    starts_B: torch.Tensor,
    accepted_B: torch.Tensor,
    final_B: torch.Tensor,
    best_B: torch.Tensor,
) -> Verified:
    ids_BQ = torch.nn.functional.pad(drafts.ids_BN, (0, 1))
    at_Q = torch.arange(ids_BQ.shape[1], device=ids_BQ.device)
    accepted_B1 = accepted_B[:, None]
    tokens_BQ = torch.where(at_Q < accepted_B1, ids_BQ, NOTHING)
    tokens_BQ = torch.where(at_Q == accepted_B1, final_B[:, None], tokens_BQ)
    absent_B = starts_B.diff() <= 0
    tokens_BQ = tokens_BQ.masked_fill(absent_B[:, None], NOTHING)
    return Verified(accepted_B, tokens_BQ, best_B.masked_fill(absent_B, 0.0))


def _launch_verify_greedy(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    *,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    made = pieces.launch(logits_RV, None, greedy_below=GREEDY_BELOW, starts_B=starts_B)
    return Verified(
        *judge.launch(
            logits_RV, starts_B, drafts_BN, made, greedy_below=GREEDY_BELOW, slots_B=slots_B
        )
    )


def _launch_verify_drawn(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    temperature_B: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    cuts: Cuts | None = None,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    made = pieces.launch(
        logits_RV, temperature_B, greedy_below=GREEDY_BELOW, starts_B=starts_B, cuts=cuts
    )
    places = Places(starts_B, seed_B, position_B)
    drawn_R, _ = draw(logits_RV, made, temperature_B, places=places, cuts=cuts)
    return Verified(
        *judge.launch(
            logits_RV, starts_B, drafts_BN, made, greedy_below=GREEDY_BELOW, drawn_R=drawn_R,
            slots_B=slots_B,
        )
    )  # fmt: skip


def _launch_verify(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    temperature_B: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    proposals: Proposals,
    cuts: Cuts | None = None,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    made = pieces.launch(
        logits_RV, temperature_B, greedy_below=GREEDY_BELOW, starts_B=starts_B, cuts=cuts
    )
    drawn_from = (proposals.ids_BNK.contiguous(), proposals.scores_BNK.contiguous())
    return Verified(
        *judge.launch(
            logits_RV, starts_B, drafts_BN, made, greedy_below=GREEDY_BELOW,
            sampling=(temperature_B, seed_B, position_B), proposals=drawn_from, cuts=cuts,
            slots_B=slots_B,
        )
    )  # fmt: skip


def _launch_verify_by_odds(
    logits_RV: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    odds_BN: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    places = (seed_B, position_B)
    return Verified(
        *judge.launch_by_odds(
            logits_RV, starts_B, drafts_BN, odds_BN.contiguous(), places, slots_B,
            vocabulary=logits_RV.shape[1],
        )
    )  # fmt: skip


def _launch_verify_tokens(
    token_R: torch.Tensor,
    best_R: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    *,
    vocabulary: int,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    return Verified(*judge.launch_tokens(token_R, best_R, starts_B, drafts_BN, vocabulary, slots_B))


def _launch_verify_tokens_by_odds(
    token_R: torch.Tensor,
    best_R: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    odds_BN: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    vocabulary: int,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    return Verified(
        *judge.launch_by_odds(
            None, starts_B, drafts_BN, odds_BN.contiguous(), (seed_B, position_B), slots_B,
            vocabulary=vocabulary, best=(token_R, best_R),
        )
    )  # fmt: skip


@triton.jit(do_not_specialize=["sequences"])
def _each_row_kernel(
    starts, temperature, seeds, positions, top_k, top_p, min_p, temperature_R, uniform_R, top_k_R,
    top_p_R, min_p_R, sequences, SEQUENCES: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = tl.minimum(sequence_of(starts, row, sequences, SEQUENCES), sequences - 1)
    at = tl.load(positions + b).to(tl.int64) + (row - tl.load(starts + b))
    number = number_of(tl.load(seeds + b), at, at * 0 + PLAIN)
    tl.store(uniform_R + row, number.to(tl.float32))
    tl.store(temperature_R + row, tl.load(temperature + b))
    if top_k is not None:
        tl.store(top_k_R + row, tl.load(top_k + b))
        tl.store(top_p_R + row, tl.load(top_p + b))
        tl.store(min_p_R + row, tl.load(min_p + b))


def _launch_each_row(
    starts_B: torch.Tensor,
    temperature_B: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    *,
    cuts: Cuts | None,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, Cuts | None]:
    sequences, device = len(starts_B) - 1, starts_B.device
    own = (None, None, None) if cuts is None else cuts.arguments
    per_B = (temperature_B, seed_B, position_B, *own)
    assert all(x is None or x.shape == (sequences,) and x.is_contiguous() for x in per_B)
    assert seed_B.dtype == torch.int64 and starts_B.is_contiguous()
    temperature_R = torch.empty(rows, dtype=temperature_B.dtype, device=device)
    uniform_R = torch.empty(rows, dtype=torch.float32, device=device)
    cuts_R = None
    if cuts is not None:
        cuts_R = Cuts(*(x_B.new_empty(rows) for x_B in cuts.arguments))
    if rows:
        bound, block = pieces.bounds_of(sequences, packed=True)
        _each_row_kernel[(rows,)](
            starts_B, *per_B, temperature_R, uniform_R,
            *((None, None, None) if cuts_R is None else cuts_R.arguments), bound,
            SEQUENCES=block, PLAIN=PLAIN, num_warps=1, **pdl(starts_B),
        )  # fmt: skip
    return temperature_R, uniform_R, cuts_R


verify_greedy = op(reference=verify_greedy_reference, kernel=_launch_verify_greedy)
verify_drawn = op(reference=verify_drawn_reference, kernel=_launch_verify_drawn)
verify = op(reference=verify_reference, kernel=_launch_verify)
verify_by_odds = op(reference=verify_by_odds_reference, kernel=_launch_verify_by_odds)
verify_tokens = op(reference=verify_tokens_reference, kernel=_launch_verify_tokens)
verify_tokens_by_odds = op(
    reference=verify_tokens_by_odds_reference, kernel=_launch_verify_tokens_by_odds
)
each_row = op(reference=each_row_reference, kernel=_launch_each_row)
