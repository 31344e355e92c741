"""Which drafts stand by the rules of their slots: constraints, bans, penalties, log-probabilities.

Row i of a sequence is judged as if the i drafts before it were output. Drafts that a grammar does
not let follow are taken out before they are judged, with all behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from limelight.ops.verify import NOTHING, Proposals, Verified
from limelight.parallel.collectives import from_first
from limelight.parallel.verifying import judge_by, judge_by_odds, judge_greedy
from limelight.runner.launched import PackedRows
from limelight.runner.sampler import Rules, Run, Sampler


@dataclass(frozen=True, slots=True)
class Offer:
    """The drafts of one sequence, whose rows are those from `first` on."""

    slot: int
    first: int
    drafts: list[int]
    position: int  # of the token that its first row gives


def offers_of(
    packed: PackedRows, members: list[int], slots: list[int], drafts_PN: list[list[int]]
) -> tuple[list[Offer], list[int]]:
    """Those of some sequences of a step, for which this waits; and their rows, packed anew."""
    starts, nexts, kept = (x.tolist() for x in (packed.starts_B, packed.next_B, packed.kept_B))
    offers: list[Offer] = []
    rows: list[int] = []
    for b, slot, drafts in zip(members, slots, drafts_PN, strict=True):
        offers.append(Offer(slot, len(rows), drafts[: kept[b]], nexts[b]))
        rows += range(starts[b], starts[b] + 1 + kept[b])
    return offers, rows


class Verifier:
    """Judges the drafts of a step where a rule has to be asked."""

    def __init__(self, sampler: Sampler, num_drafts: int):
        """No sequence has more drafts."""
        self.sampler, self.num_drafts = sampler, num_drafts

    def judge(
        self,
        logits_RV: torch.Tensor,
        offers: list[Offer],
        proposals: Proposals | None,
        odds_BN: torch.Tensor | None = None,
        *,
        rows: list[int] | None = None,
    ) -> dict[int, Run]:
        """By slot, from raw FP32 logits whose first rows, or `rows`, are those of the offers; the
        rules go on accordingly.

        `proposals` has what each offer's drafts were drawn from, `odds_BN` what they stand by where
        acceptance is synthetic.
        """
        tries, counts, shown = self._all_tries(offers)
        # A drawn draft is refused by its chance, not by what it is: the first that may not follow
        # is judged too.
        drawn = proposals is not None and odds_BN is None
        most = zip(offers, shown if drawn else counts, strict=True)
        judged = [offer.drafts[:count] for offer, count in most]
        processed_PV = self.sampler.processed(logits_RV, tries, rows)
        verified = self._verify(processed_PV, offers, judged, proposals, odds_BN)
        each = zip(
            offers, counts, verified.tokens_BQ.tolist(), verified.accepted_B.tolist(),
            verified.best_B.tolist(), strict=True,
        )  # fmt: skip
        runs = {
            offer.slot: self._settle(
                offer,
                Run(tokens[: accepted + 1], count, accepted),
                best,
                tries[offer.first + accepted],
            )
            for offer, count, tokens, accepted, best in each
        }
        self._report(runs, logits_RV, processed_PV, offers, tries, verified, rows)
        return runs

    def _report(
        self,
        runs: dict[int, Run],
        logits_RV: torch.Tensor,
        processed_PV: torch.Tensor,
        offers: list[Offer],
        tries: list[Rules],
        verified: Verified,
        rows: list[int] | None,
    ) -> None:
        """Give the runs the log-probabilities that they tell. All ranks ask for the same rows,
        also of what a guide, which not all have, then refuses."""
        made = zip(offers, verified.tokens_BQ.tolist(), verified.accepted_B.tolist(), strict=True)
        told = [
            (offer, tokens[: accepted + 1])
            for offer, tokens, accepted in made
            if self.sampler.rules[offer.slot].reports
        ]
        at = [offer.first + i for offer, tokens in told for i in range(len(tokens))]
        token_ids = [token_id for _, tokens in told for token_id in tokens]
        reports = iter(
            self.sampler.reports(logits_RV, processed_PV, tries, at, token_ids, rows=rows)
        )
        for offer, tokens in told:
            run = runs[offer.slot]
            run.tell(list(islice(reports, len(tokens)))[: len(run.token_ids)])

    def _all_tries(self, offers: list[Offer]) -> tuple[list[Rules], list[int], list[int]]:
        """`_tries` of all offers; how many may follow where guides say so is what rank 0 says."""
        made = [self._tries(offer) for offer in offers]
        tries = [rule for rules, _, _ in made for rule in rules]
        counts, shown = [count for _, count, _ in made], [most for _, _, most in made]
        share = self.sampler.share
        if share is not None and any(self.sampler.rules[offer.slot].guided for offer in offers):
            counts, shown = from_first(self._integers([counts, shown]), share.mesh).tolist()
        return tries, counts, shown

    def _tries(self, offer: Offer) -> tuple[list[Rules], int, int]:
        """The rule of each row, how many of the drafts may follow at all, and the same with the
        first that a mask forbids."""
        rule = self.sampler.rules[offer.slot]
        tries, count = [rule], len(offer.drafts)
        shown = count
        for i, draft in enumerate(offer.drafts):
            if i < count and not rule.on_device:
                after = rule.fork()
                after.record(draft)
                if after.has_left:
                    count, shown = i, i + after.is_refused
                else:
                    rule = after
            tries.append(rule)
        return tries, count, shown

    def _verify(
        self,
        logits_RV: torch.Tensor,
        offers: list[Offer],
        judged: list[list[int]],
        proposals: Proposals | None,
        odds_BN: torch.Tensor | None,
    ) -> Verified:
        rules = [self.sampler.rules[offer.slot] for offer in offers]
        # As many places whatever was kept: kernels are compiled for their number.
        most = self.num_drafts
        drafts = [ids + [NOTHING] * (most - len(ids)) for ids in judged]
        starts_B = self._integers([offer.first for offer in offers] + [len(logits_RV)]).int()
        drafts_BN = self._integers(drafts).view(len(offers), most)
        share = self.sampler.share
        if odds_BN is not None:
            return judge_by_odds(
                logits_RV, starts_B, drafts_BN, odds_BN,
                self._integers([rule.request.seed for rule in rules]),
                self._integers([offer.position for offer in offers]), share,
            )  # fmt: skip
        if all(rule.greedy for rule in rules):
            return judge_greedy(logits_RV, starts_B, drafts_BN, share)
        params = [rule.request.params for rule in rules]
        return judge_by(
            proposals, logits_RV, starts_B, drafts_BN,
            self.sampler.numbers([p.temperature for p in params]),
            self._integers([rule.request.seed for rule in rules]),
            self._integers([offer.position for offer in offers]), share,
            cuts=self.sampler.cuts(rules),
        )  # fmt: skip

    def _integers(self, values: Sequence[int | Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.sampler.device)

    def _settle(self, offer: Offer, run: Run, best: float, tried: Rules) -> Run:
        """Let the rule go on by what stood, and see what comes of the token behind it.

        Where none comes, the last draft that stood is the step's last token: the next step finds
        the same behind it, unless it has ended the answer.
        """
        rule, (*stood, last) = self.sampler.rules[offer.slot], run.token_ids
        for token_id in stood:
            rule.record(token_id)
        if rule.guide is not None and tried.guide is not None and rule.guide.refused is None:
            rule.guide.refused = tried.guide.refused
        found = self.sampler.settle(rule, best, last)
        if found.token_ids:
            return run
        if stood:
            return Run(stood, run.verified, len(stood) - 1)
        found.verified = run.verified
        return found
