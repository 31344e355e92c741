"""Steps with drafts: rows -> the target -> which drafts stand -> drafts for the next step.

Where a sequence stands and what was drafted for it only the device knows, so the host sends how
many rows each sequence has at least, and the rows themselves are laid out on the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from limelight.models.batch import Batch
from limelight.models.loader import Model
from limelight.models.taps import Taps
from limelight.ops.paging import FEW_QUERIES
from limelight.ops.pieces import Cuts
from limelight.ops.rows import Asked, Rows, lay_rows, stand
from limelight.ops.trim import keep
from limelight.ops.verify import NOTHING
from limelight.parallel.collectives import from_first
from limelight.parallel.verifying import judge_by, judge_by_odds, judge_greedy
from limelight.progress import Progress
from limelight.runner.adapters import RowAdapters
from limelight.runner.drafter import Drafter
from limelight.runner.graphs import Graphs, graph_sizes, prompt_sizes
from limelight.runner.inputs import (
    DraftedTensors,
    Extent,
    PassTensors,
    StepInputs,
    StepTensors,
    fill,
    gains_nothing_by_a_graph,
    lay_out,
    prompts_of,
)
from limelight.runner.launched import Judged, Launched, Outcome, PackedRows, Stopwatch
from limelight.runner.sampler import Sampler
from limelight.runner.transfers import sent
from limelight.runner.verifier import Verifier, offers_of
from limelight.steps import Grant, StepPlan, Trim

# Above so many rows a step takes so long that a graph gains nothing.
MOST_ROWS_OF_A_GRAPH = 1024
# Rows with a prompt for each row of a draft that their graph has room for, if all sequences decode.
DRAFTS_BESIDE_A_PROMPT = 4
# Graphs are no further apart, so a step has fewer rows of padding.
MOST_PADDING = 16


class DraftedSteps:
    """Makes steps of a target and its drafter; the runner has admitted who takes part."""

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        sampler: Sampler,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        adapters: RowAdapters,
    ):
        self.adapters = adapters
        self.model, self.drafter, self.sampler = model, drafter, sampler
        self.verifier = Verifier(sampler, drafter.num_drafts)
        self.storage, self.tables = drafter.storage, drafter.tables
        self.device = self.storage.pool.device
        most = max(max_num_batched_tokens, max_num_seqs)
        self.inputs = StepInputs(
            DraftedTensors, (most, max(most, max_num_seqs + 1), drafter.num_drafts),
            groups=len(self.storage.groups), device=self.device,
        )  # fmt: skip
        self.passes = StepInputs(PassTensors, (max_num_seqs,), groups=0, device=self.device)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.graphs: Graphs[DraftedTensors, Outcome] | None = None
        self.uncut_graphs: Graphs[DraftedTensors, Outcome] | None = None
        self.prompt_graphs: Graphs[DraftedTensors, Outcome] | None = None
        self.pass_graphs: Graphs[PassTensors, torch.Tensor] | None = None

    def capture(
        self, progress: Progress, limit: Callable[[int], int]
    ) -> Graphs[DraftedTensors, Outcome]:
        """Make graphs of steps, and of the passes of the drafter; one of them. `limit` says how
        many of so many rows a graph of the model can have."""
        most = self.max_num_seqs * (1 + self.drafter.num_drafts)
        most = min(most, MOST_ROWS_OF_A_GRAPH, self.max_num_batched_tokens)
        self.prompt_graphs = Graphs(
            lambda tensors: self._step(tensors, self.extent_with_prompts(len(tensors.tokens_T))),
            lambda rows: self._send(None, [], self.extent_with_prompts(rows), {}),
            prompt_sizes(limit(self.max_num_batched_tokens)), progress,
            name="graphs of drafts beside prompts", adapters=self.adapters, lend=Outcome.lent,
        )  # fmt: skip
        sizes = graph_sizes(limit(most))
        self.graphs = self._capture(sizes, progress, "graphs of steps", cuts=True)
        if self.model.head.share is not None:
            # Ranks find where cut-offs end in many exchanges.
            name = "graphs of steps without cut-offs"
            self.uncut_graphs = self._capture(sizes, progress, name, cuts=False)
        self.pass_graphs = Graphs(
            self._pass, lambda count: self._send_pass([], count),
            graph_sizes(self.max_num_seqs), progress, name="graphs of drafts", beside=self.graphs,
        )  # fmt: skip
        return self.graphs

    def _capture(
        self, sizes: list[int], progress: Progress, name: str, *, cuts: bool
    ) -> Graphs[DraftedTensors, Outcome]:
        """Graphs of steps in which all decode, beside others."""

        def extent(rows: int) -> Extent:
            return replace(self.extent_of_graph(rows), cuts=cuts)

        return Graphs(
            lambda tensors: self._step(tensors, extent(len(tensors.tokens_T))),
            lambda rows: self._send(None, [], extent(rows), {}),
            sizes, progress, name=name, beside=self.graphs or self.prompt_graphs,
            adapters=self.adapters, lend=Outcome.lent,
        )  # fmt: skip

    def drop_graphs(self) -> None:
        """Make all steps without graphs, until they are captured again."""
        self.graphs = self.uncut_graphs = self.prompt_graphs = self.pass_graphs = None

    def extent_of_graph(self, rows: int) -> Extent:
        """All that a graph of so many rows must be ready for, in which all decode."""
        seqs = min(rows, self.max_num_seqs + MOST_PADDING)
        most = 1 + self.drafter.num_drafts
        return Extent(
            rows, rows, seqs, seqs, (most, self.drafter.max_model_len),
            trims=True, greedy=False, cuts=True, busy=-(-rows // most),
        )  # fmt: skip

    def extent_with_prompts(self, rows: int) -> Extent:
        """The same where prompts may be among them; behind all sequences that there can be, one of
        padding takes the rows that are left."""
        picks = min(rows, self.max_num_seqs + rows // DRAFTS_BESIDE_A_PROMPT)
        return Extent(
            rows, picks, self.max_num_seqs + 1, 0, (rows, self.drafter.max_model_len),
            trims=True, greedy=False, cuts=True,
            mixed=min(1 + self.drafter.num_drafts, FEW_QUERIES),
        )  # fmt: skip

    def _step(self, tensors: DraftedTensors, extent: Extent) -> Outcome:
        """A step all on the device."""
        _, logits_RV, rows = self.run(tensors, extent)
        return self.judge(logits_RV, rows, tensors, extent)

    def follow(self, tensors: StepTensors, batch: Batch) -> torch.Tensor:
        """The hidden states of a step without drafts; the drafter's cache gets its part of them, on
        a CPU perhaps late."""
        self.drafter.lengths_S.index_copy_(0, tensors.rows_B.long(), tensors.seq_lens_B)
        return self._forward(tensors.tokens_T, batch, late=self.device.type == "cpu")

    def _forward(self, tokens_T: torch.Tensor, batch: Batch, *, late: bool) -> torch.Tensor:
        """The target's hidden states; what it leaves a drafter goes into the cache."""
        assert batch.paged is not None
        taps = Taps(self.drafter.model.config.taps)
        hidden_TD = self.model(tokens_T, batch, taps)
        self.drafter.take(taps.joined(), batch.positions_T, batch.paged.layouts, late=late)
        return hidden_TD

    def launch(
        self, plan: StepPlan, grants: list[Grant], known: Mapping[int, list[int]], *, hidden: bool
    ) -> tuple[Launched, torch.Tensor]:
        """Start a step of `grants`, those with few queries first; also the `hidden` states of its
        rows, if they are asked for. `known` are the tokens of each slot that the host knows."""
        extent = self._extent(plan, grants)
        launched = Launched(plan, grants, self.device)
        watch = Stopwatch(self.device, plan, rows=extent.rows) if plan.timed else None
        self.drafter.catch_up()
        hidden_TD = self._verify(launched, extent, known, hidden=hidden)
        if watch is not None:
            watch.mark()
        sampling = [grant for grant in grants if grant.samples]
        if plan.drafts and sampling:
            launched.odds_PN = self._draft(sampling)
            if watch is not None:
                watch.drafted(len(sampling))
        launched.times = watch
        return launched.end(), hidden_TD

    def _verify(
        self,
        launched: Launched,
        extent: Extent,
        known: Mapping[int, list[int]],
        *,
        hidden: bool,
    ) -> torch.Tensor:
        """The target's part of a step; the hidden states, of no rows where a graph kept them."""
        grants, trim = launched.order, launched.plan.trim
        found = None if hidden else self._graph_of(extent)
        hidden_TD = self.drafter.scores_SNK.new_empty(0)
        if found is not None:
            graphs, of_graph = found
            tensors = self._send(trim, grants, of_graph, known)
            outcome = graphs.replay(of_graph.rows)
        else:
            tensors = self._send(trim, grants, extent, known)
            hidden_TD, logits_RV, rows = self.run(tensors, extent)
            if not len(logits_RV):  # no one has a next token
                self.drafter.lengths_S[tensors.rows_B.long()] = rows.next_B.int()
                return hidden_TD
            outcome = self.judge(logits_RV, rows, tensors, extent)
        rules = {
            b: self.sampler.rules[grant.slot] for b, grant in enumerate(grants) if grant.samples
        }
        own = {b: rule for b, rule in rules.items() if rule.on_device}
        launched.judged, launched.logprobs = outcome.judged, outcome.logprobs(own, self.sampler)
        if asked := [b for b in rules if b not in own]:
            self._judge_by_rules(launched, outcome, asked)
        return hidden_TD

    def _graph_of(self, extent: Extent) -> tuple[Graphs[DraftedTensors, Outcome], Extent] | None:
        """The graphs one of which holds such a step, and what that one is ready for."""
        decodes = extent.picks == extent.rows
        graphs, rows = self.graphs if extent.cuts else self.uncut_graphs, extent.rows
        graphs = graphs or self.graphs
        if not decodes:
            # One with room for its rows of logits may have more rows than it needs.
            beyond = extent.picks - self.max_num_seqs
            graphs, rows = self.prompt_graphs, max(rows, DRAFTS_BESIDE_A_PROMPT * beyond)
        size = None if graphs is None else graphs.size_for(rows)
        if graphs is None or size is None:
            return None
        if gains_nothing_by_a_graph(extent.prompts, self.storage):
            return None
        of_graph = self.extent_of_graph(size) if decodes else self.extent_with_prompts(size)
        return (graphs, of_graph) if extent.picks <= of_graph.picks else None

    def _extent(self, plan: StepPlan, grants: list[Grant]) -> Extent:
        offered, kept = _kept(None, grants), _kept(plan.trim, grants)
        rules = [self.sampler.rules[grant.slot] for grant in grants if grant.samples]
        # Those with rules are judged anew.
        own = [rule for rule in rules if rule.on_device]
        counts = [grant.num_tokens for grant in grants]
        rows, most = sum(counts) - offered + kept, max(counts)
        return Extent(
            rows=rows,
            picks=len(rules) + kept,
            seqs=len(grants),
            few=sum([count <= FEW_QUERIES for count in counts]),
            # What is under way may stand wholly.
            bounds=(most, max([g.start + g.num_tokens for g in grants]) + self.drafter.num_drafts),
            trims=kept < offered,
            greedy=all([rule.greedy for rule in own]),
            cuts=any([rule.truncated for rule in own]),
            prompts=prompts_of(grants, rows),
        )

    def _send(
        self,
        trim: Trim | None,
        grants: list[Grant],
        extent: Extent,
        known: Mapping[int, list[int]],
    ) -> DraftedTensors:
        """A step's inputs on the device; what there is beyond the grants is padding."""
        size = (extent.rows, extent.seqs, self.drafter.num_drafts)
        to = self.inputs.stage(size).arrays
        nobody, mixed = self.tables.nobody, extent.mixed is not None
        bases = [grant.num_tokens - grant.num_drafts for grant in grants]
        codes: list[int] = []
        firsts = []
        for grant, base in zip(grants, bases, strict=True):
            ids = known[grant.slot][grant.start : grant.start + base]
            firsts.append(grant.start if ids else -1)
            codes += ids
        # Sequences whose tokens are not known come first.
        to["tokens_T"][:] = -1
        # Of a graph the last rows are padding.
        end = sum(bases) + _kept(trim, grants)
        to["tokens_T"][end - len(codes) : end] = codes
        rules = [self.sampler.rules[grant.slot] for grant in grants]
        for name, values, rest in (
            ("rows_B", [grant.slot for grant in grants], nobody),
            # Of padding each has a row, or the last one all.
            ("bases_B", bases, 0 if mixed else 1),
            ("offered_B", [grant.num_drafts for grant in grants], 0),
            ("firsts_B", firsts, 0),
            ("samples_B", [int(grant.samples) for grant in grants], 0),
            ("seeds_B", [rule.request.seed for rule in rules], 0),
            ("temperature_B", [rule.request.params.temperature for rule in rules], 0.0),
        ):
            fill(to[name], values, rest)
        for name, numbers, off in self.sampler.cut_offs(rules):
            fill(to[f"{name}_B"], numbers, off)
        if mixed:
            to["bases_B"][-1] = extent.rows
        to["budget_1"][:] = extent.rows if trim is None else trim.budget
        to["trim_M"][:] = 0.0 if trim is None else [trim.slope, *trim.intercepts]
        return self.inputs.send(size)

    def _judge_by_rules(self, launched: Launched, outcome: Outcome, members: list[int]) -> None:
        """As `judge`, anew, of some sequences, for which the host has to be asked."""
        assert outcome.packed is not None
        slots = [launched.order[b].slot for b in members]
        slots_P, members_P = (sent(x, torch.int64, self.device) for x in (slots, members))
        drafts_PN = self.drafter.tokens_SN[slots_P].tolist()
        offers, rows = offers_of(outcome.packed, members, slots, drafts_PN)
        launched.runs = self.verifier.judge(
            outcome.logits_RV, offers, *self.drafter.waiting(slots_P), rows=rows
        )
        ends = [x for slot in slots for x in launched.runs[slot].end]
        ends_P2 = sent(ends, torch.int64, self.device).view(-1, 2)
        if any(self.sampler.rules[slot].guided for slot in slots):
            # What a guide refuses rank 0 alone knows.
            ends_P2 = from_first(ends_P2, self.model.head.mesh)
        accepted_P, last_P = ends_P2.unbind(1)
        next_P = outcome.packed.next_B[members_P]
        self.drafter.lengths_S[slots_P] = (next_P + accepted_P).int()
        last_P = torch.where(last_P == NOTHING, self.drafter.last_tokens_S[slots_P], last_P)
        self.drafter.last_tokens_S[slots_P] = last_P

    def _draft(self, sampling: list[Grant]) -> torch.Tensor:
        """New drafts for these; their log odds."""
        graphs = self.pass_graphs
        if graphs is None or (size := graphs.size_for(len(sampling))) is None:
            return self._pass(self._send_pass(sampling, len(sampling)))
        self._send_pass(sampling, size)
        return graphs.replay(size)[: len(sampling)]

    def _pass(self, tensors: PassTensors) -> torch.Tensor:
        return self.drafter.draft(tensors.rows_B, tensors.seeds_B, tensors.temperature_B)

    def _send_pass(self, sampling: list[Grant], size: int) -> PassTensors:
        to = self.passes.stage((size,)).arrays
        requests = [self.sampler.rules[grant.slot].request for grant in sampling]
        fill(to["rows_B"], [grant.slot for grant in sampling], self.tables.nobody)
        fill(to["seeds_B"], [request.seed for request in requests], 0)
        fill(to["temperature_B"], [request.params.temperature for request in requests], 0.0)
        return self.passes.send((size,))

    def run(
        self, tensors: DraftedTensors, extent: Extent
    ) -> tuple[torch.Tensor, torch.Tensor, Rows]:
        """The target over a step's rows, whose keys and values the drafter's cache gets too: hidden
        states, logits where they are needed, and the rows."""
        rows = self._lay_rows(tensors, extent)
        layouts = lay_out(
            self.tables, self.storage,
            rows_B=tensors.rows_B, seq_lens_B=rows.seq_lens_B, starts_B=rows.starts_B,
            slots_GT=rows.slots_GT, few=extent.few, bounds=extent.bounds,
            busy=extent.busy, mixed=extent.mixed, prompts=extent.prompts,
        )  # fmt: skip
        paged = self.storage.paged(layouts)
        batch = Batch(rows.positions_T, paged, self.drafter.last_tokens_S)
        with self.adapters.of_rows(tensors.rows_B, rows.starts_B, len(rows.tokens_T)):
            hidden_TD = self._forward(rows.tokens_T, batch, late=False)
        picked = rows.picked_R
        logits_RV = self.model.logits(hidden_TD if picked is None else hidden_TD[picked])
        return hidden_TD, logits_RV, rows

    def judge(
        self, logits_RV: torch.Tensor, rows: Rows, tensors: DraftedTensors, extent: Extent
    ) -> Outcome:
        """Which drafts stand by the logits alone, and where each sequence then stands."""
        drafter, rows_B = self.drafter, tensors.rows_B
        judged = (logits_RV, rows.picked_starts_B, drafter.tokens_SN)
        share = self.model.head.share
        if extent.greedy:
            verified = judge_greedy(*judged, share, slots_B=rows_B)
        else:
            cuts = Cuts(tensors.top_k_B, tensors.top_p_B, tensors.min_p_B)
            verified = judge_by(
                drafter.proposals, *judged, tensors.temperature_B, tensors.seeds_B, rows.next_B,
                share, cuts=cuts if extent.cuts else None, slots_B=rows_B,
            )  # fmt: skip
        if drafter.synthetic is not None:
            # Such steps are timed, so all that a real one does has been done as well.
            verified = judge_by_odds(
                *judged, drafter.odds_SN, tensors.seeds_B, rows.next_B, share, slots_B=rows_B
            )
        stand(drafter.lengths_S, drafter.last_tokens_S, rows_B, rows.next_B, verified)
        made = Judged(verified.tokens_BQ, verified.best_B, rows.kept_B, verified.accepted_B)
        packed = PackedRows(rows.picked_starts_B, rows.next_B, rows.kept_B)
        return Outcome(made, logits_RV, packed=packed)

    def _lay_rows(self, tensors: DraftedTensors, extent: Extent) -> Rows:
        drafter = self.drafter
        if extent.trims:
            kept_B = keep(
                drafter.odds_SN, tensors.rows_B, tensors.offered_B, tensors.trim_M, tensors.budget_1
            )
        else:
            kept_B = tensors.offered_B.long()
        asked = Asked(tensors.rows_B, tensors.bases_B, kept_B, tensors.firsts_B, tensors.samples_B)
        # Where all decode every row needs logits, those of padding too; a prompt's do not.
        all_ = extent.mixed is None and extent.picks == extent.rows
        picks = None if all_ else extent.picks
        return lay_rows(tensors.tokens_T, asked, drafter.slots, picks=picks)


def _kept(trim: Trim | None, grants: list[Grant]) -> int:
    """How many drafts a step verifies."""
    offered = sum([grant.num_drafts for grant in grants])
    return offered if trim is None else min(trim.budget, offered)
