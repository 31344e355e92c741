"""StepPlan -> Batch -> forward -> sample -> StepResult."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from limelight.cache.storage import KVStorage
from limelight.models.adapters import AdapterRoom
from limelight.models.batch import Batch
from limelight.models.dflash2 import DFlash2
from limelight.models.loader import Model
from limelight.ops import batch_invariance
from limelight.ops.noise import plain_uniform
from limelight.ops.paging import FEW_QUERIES, Prompt
from limelight.ops.synthetic import SyntheticOdds
from limelight.progress import Progress
from limelight.runner.adapters import RowAdapters
from limelight.runner.divided import DividedLayers
from limelight.runner.drafted import DraftedSteps
from limelight.runner.drafter import Drafter
from limelight.runner.drawing import draw, finish
from limelight.runner.graphs import Graphs, graph_sizes, prompt_sizes
from limelight.runner.inputs import (
    BlockTables,
    Size,
    Slot,
    StepInputs,
    StepTensors,
    fill,
    fill_rows,
    gains_nothing_by_a_graph,
    keep,
    lay_out,
    prompts_of,
)
from limelight.runner.launched import Launched, Outcome, Stopwatch, device_faults
from limelight.runner.prompt_logprobs import prompt_logprobs, tells_prompts
from limelight.runner.sampler import NO_GRAMMARS, Rules, Sampler
from limelight.steps import Admission, Grant, StepPlan, StepResult
from limelight.types import LogprobsMode, Request

if TYPE_CHECKING:
    import xgrammar


class ModelRunner:
    """Executes plans on one model and its cache; keeps block tables and last tokens by slot."""

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: list[int],
        grammars: Mapping[str, "xgrammar.CompiledGrammar"] = NO_GRAMMARS,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        batch_invariant: bool = False,
        room: AdapterRoom | None = None,
    ):
        self.model, self.storage, self.mesh = model, storage, model.head.mesh
        self.device = storage.pool.device
        self.block_size, self.max_model_len = storage.shape.size, max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.tables = BlockTables(
            groups=len(storage.groups),
            slots=max_num_seqs,
            max_blocks=-(-max_model_len // self.block_size),
            device=self.device,
        )
        self.inputs = StepInputs(
            StepTensors,
            (max(max_num_batched_tokens, max_num_seqs), max_num_seqs + 1, max_num_seqs),
            groups=len(storage.groups), device=self.device,
        )  # fmt: skip
        # One more for padding rows, which belong to no sequence.
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        self.batch_invariant = batch_invariant
        self.kept = None if batch_invariant else keep(storage, heads=model.config.num_heads)
        self.slots: dict[int, Slot] = {}
        self.sampler = Sampler(
            vocab_size=model.head.outputs,
            eos_token_ids=eos_token_ids,
            device=self.device,
            grammars=grammars,
            share=model.head.share,
            logprobs_mode=logprobs_mode,
        )
        self.adapters = RowAdapters(room, max_num_seqs=max_num_seqs, device=self.device)
        self.graphs: Graphs[StepTensors, Outcome] | None = None  # of one token a sequence
        self.uncut_graphs: Graphs[StepTensors, Outcome] | None = None  # without cut-offs
        self.prompt_graphs: Graphs[StepTensors, Outcome] | None = None
        self.drafted: DraftedSteps | None = None
        self.experts = DividedLayers(model, self.device)

    def draft_by(
        self,
        model: DFlash2,
        *,
        num_drafts: int,
        draws: bool,
        synthetic: SyntheticOdds | None = None,
    ) -> Drafter:
        """Make all steps from here on with drafts of this drafter."""
        drafter = Drafter(
            model, self.storage, self.tables, self.last_tokens,
            num_drafts=num_drafts, max_model_len=self.max_model_len, draws=draws,
            synthetic=synthetic,
        )  # fmt: skip
        self.drafted = DraftedSteps(
            self.model, drafter, self.sampler,
            max_num_seqs=self.tables.nobody, max_num_batched_tokens=self.max_num_batched_tokens,
            adapters=self.adapters,
        )  # fmt: skip
        return drafter

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for it."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; the device may still run the one before."""
        with (
            device_faults(self.device),
            torch.inference_mode(),
            batch_invariance(self.batch_invariant),
        ):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> Launched:
        self.experts.pace(plan)
        for move in plan.moves:
            self.adapters.move(move)
        if not plan.grants and plan.together is not None:
            return self._lend(plan)
        for admission in plan.admissions:
            self._admit(admission)
        self.adapters.begin(plan.grants)
        self.tables.update((grant.slot, grant.tables) for grant in plan.grants)
        grants = plan.grants
        if any([grant.num_tokens > FEW_QUERIES for grant in grants]):
            # Attention takes the sequences with few queries first.
            grants = sorted(grants, key=lambda grant: grant.num_tokens > FEW_QUERIES)
        if self.drafted is None:
            return self._launch_plain(plan, grants).end()
        if not plan.is_plain:
            return self._launch_drafted(self.drafted, plan, grants)
        watch = Stopwatch(self.device, plan, rows=plan.num_tokens) if plan.timed else None
        self.drafted.drafter.make_way(grants)
        launched = self._launch_plain(plan, grants)
        if watch is not None:
            watch.mark()
        launched.times = watch
        return launched.end()

    def _lend(self, plan: StepPlan) -> Launched:
        """Let this rank's experts work for those of other engines alone."""
        if (replay := self._graph_of(plan, [], [])) is not None:
            replay()
        else:
            self.experts.serve()
        return Launched(plan, [], self.device).end()

    def _launch_plain(self, plan: StepPlan, grants: list[Grant]) -> Launched:
        sampling = [grant for grant in grants if grant.samples]
        rules = [self.sampler.rules[grant.slot] for grant in sampling]
        launched = Launched(plan, sampling, self.device)
        if (replay := self._graph_of(plan, grants, sampling)) is not None:
            outcome = replay()
        else:
            tensors = self._send((plan.num_tokens, len(grants), len(sampling)), grants, sampling)
            hidden_TD = self._forward(tensors, grants)
            requests = self._requests(grants)
            launched.prompt_logprobs = prompt_logprobs(self.model, requests, hidden_TD)
            if sampling:
                outcome = self._draw(tensors, hidden_TD[tensors.samples_R], rules)
        if sampling:
            finish(launched, outcome, self.sampler, self.last_tokens, self.mesh)
        return launched

    def _draw(self, tensors: StepTensors, hidden_RD: torch.Tensor, rules: list[Rules]) -> Outcome:
        # The tokens of rows with rules are drawn anew.
        cuts = any(rule.truncated for rule in rules if rule.on_device)
        return draw(self.model, hidden_RD, tensors, self.last_tokens, cuts=cuts)

    def _launch_drafted(
        self, drafted: DraftedSteps, plan: StepPlan, grants: list[Grant]
    ) -> Launched:
        known = {grant.slot: self.slots[grant.slot].token_ids for grant in grants}
        if any([grant.start < len(known[grant.slot]) for grant in grants]):
            # Those whose tokens only the device knows come first of all.
            grants = sorted(grants, key=lambda grant: grant.start < len(known[grant.slot]))
        requests = self._requests(grants)
        tells = tells_prompts(requests)
        launched, hidden_TD = drafted.launch(plan, grants, known, hidden=tells)
        if tells:
            launched.prompt_logprobs = prompt_logprobs(self.model, requests, hidden_TD)
        return launched

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Make graphs of steps; the model must have run before."""
        most = self.experts.most_rows_of_a_graph
        with batch_invariance(self.batch_invariant):
            beside = None if self.drafted is None else self.drafted.capture(progress, most)
            self.prompt_graphs = Graphs(
                self.read, lambda rows: self._send(self._size_with_prompts(rows), [], []),
                prompt_sizes(most(self.max_num_batched_tokens)), progress,
                name="graphs of steps with prompts", beside=beside, adapters=self.adapters,
                lend=Outcome.lent,
            )  # fmt: skip
            self.graphs = Graphs(
                self.decode, lambda count: self._send((count,) * 3, [], []),
                graph_sizes(most(self.tables.nobody)), progress, beside=self.prompt_graphs,
                adapters=self.adapters, lend=Outcome.lent,
            )  # fmt: skip
            if self.mesh.group is not None:
                # Ranks find where cut-offs end in many exchanges.
                self.uncut_graphs = Graphs(
                    lambda tensors: self.decode(tensors, cuts=False),
                    lambda count: self._send((count,) * 3, [], []),
                    self.graphs.sizes, progress, name="graphs without cut-offs",
                    beside=self.graphs, adapters=self.adapters, lend=Outcome.lent,
                )  # fmt: skip

    def forget_device(self) -> None:
        """Let go of graphs, and of what is kept beside the cache: memory is about to change."""
        if self.drafted is not None:
            self.drafted.drafter.catch_up()
        self.drop_graphs()
        self.forget_kept()

    def forget_kept(self) -> None:
        """Let go of what is kept beside the cache, which has parts of the weights."""
        for kept in self.kept or ():
            kept.stop()

    def drafted_sizes(self, *, prompts: bool) -> list[int]:
        """Rows of the graphs of steps with drafts; none without graphs."""
        drafted = self.drafted
        if drafted is None:
            return []
        graphs = drafted.prompt_graphs if prompts else drafted.graphs
        return [] if graphs is None else graphs.sizes

    def drop_graphs(self) -> None:
        """Let go of all graphs, and of what they hold on to."""
        self.graphs = self.uncut_graphs = self.prompt_graphs = None
        if self.drafted is not None:
            self.drafted.drop_graphs()

    def pretend(self, length: int) -> None:
        """Let every slot's sequence have so many tokens in the cache, for a step that is timed."""
        assert self.drafted is not None
        self.drafted.drafter.lengths_S.fill_(length)

    def forget(self) -> None:
        """Drop what is known of every slot."""
        self.slots.clear()
        self.adapters.forget()
        if self.drafted is not None:
            self.drafted.drafter.forget_late()
        self.sampler.rules.clear()
        self.experts.forget()

    def decode(self, tensors: StepTensors, *, cuts: bool = True) -> Outcome:
        """A step of one token for each sequence, all on the device."""
        batch = self._batch(tensors, few=len(tensors.rows_B), bounds=(1, self.max_model_len))
        hidden_RD = self._run(tensors, batch)
        return draw(self.model, hidden_RD, tensors, self.last_tokens, cuts=cuts)

    def read(self, tensors: StepTensors) -> Outcome:
        """A step of prompts and of sequences that decode, all on the device."""
        bounds = (len(tensors.tokens_T), self.max_model_len)
        hidden_TD = self._run(tensors, self._batch(tensors, few=0, bounds=bounds, mixed=1))
        hidden_RD = hidden_TD[tensors.samples_R]
        return draw(self.model, hidden_RD, tensors, self.last_tokens, cuts=True)

    def _run(self, tensors: StepTensors, batch: Batch) -> torch.Tensor:
        """The hidden states of a step; a drafter gets what it needs to go on from there."""
        with self.adapters.of_rows(tensors.rows_B, tensors.starts_B, len(tensors.tokens_T)):
            if self.drafted is None:
                return self.model(tensors.tokens_T, batch)
            return self.drafted.follow(tensors, batch)

    def _send(self, size: Size, grants: list[Grant], sampling: list[Grant]) -> StepTensors:
        """A step's inputs on the device, rows beyond the grants' as padding."""
        self._stage(self.inputs.stage(size), grants, sampling)
        return self.inputs.send(size)

    def _admit(self, admission: Admission) -> None:
        request = admission.request
        token_ids = request.prompt_token_ids + admission.output_token_ids
        self.slots[admission.slot] = Slot(request, token_ids)
        self.adapters.admit(admission.slot, admission.adapter_slot)
        self.sampler.admit(admission.slot, request, admission.output_token_ids)

    def can_replay(self, plan: StepPlan) -> bool:
        """Whether a graph can hold a plan for sequences that are here, if it is large enough."""
        if self.graphs is None or plan.admissions or not plan.is_plain:
            return False
        return self._fits_a_graph(plan.grants)

    def graph_size(self, rows: int, *, decodes: bool) -> int | None:
        """The size of the graph for so many rows; None if there is none."""
        graphs = self.graphs if decodes else self.prompt_graphs
        return None if graphs is None else graphs.size_for(rows)

    def _graph_of(
        self, plan: StepPlan, grants: list[Grant], sampling: list[Grant]
    ) -> Callable[[], Outcome] | None:
        """The replay of the graph that holds this step, for which all is sent; None without."""
        decodes, rows = plan.decodes, None
        if plan.together is not None:
            decodes, rows = plan.together.decodes, plan.together.graph
        elif self._fits_a_graph(grants):
            rows = self.graph_size(plan.num_tokens, decodes=decodes)
        graphs = self._graphs_of(sampling) if decodes else self.prompt_graphs
        if graphs is None or rows is None:
            return None
        size = (rows,) * 3 if decodes else self._size_with_prompts(rows)
        self._send(size, grants, sampling)
        return lambda: graphs.replay(rows)

    def _fits_a_graph(self, grants: list[Grant]) -> bool:
        """Whether a graph that is large enough would do, and be of use."""
        if tells_prompts(self._requests(grants)):
            return False
        prompts = prompts_of(grants, sum(grant.num_tokens for grant in grants))
        return not gains_nothing_by_a_graph(prompts, self.storage)

    def _graphs_of(self, sampling: list[Grant]) -> "Graphs[StepTensors, Outcome] | None":
        """Those of steps in which all decode."""
        if self.uncut_graphs is None:
            return self.graphs
        rules = (self.sampler.rules[one.slot] for one in sampling)
        cuts = any(rule.truncated for rule in rules if rule.on_device)
        return self.graphs if cuts else self.uncut_graphs

    def _size_with_prompts(self, rows: int) -> Size:
        """Behind all sequences that there can be, one of padding takes the rows that are left."""
        return rows, self.tables.nobody + 1, min(rows, self.tables.nobody)

    def _requests(self, grants: list[Grant]) -> list[tuple[Grant, Request]]:
        return [(grant, self.slots[grant.slot].request) for grant in grants]

    def _stage(self, tensors: StepTensors, grants: list[Grant], sampling: list[Grant]) -> None:
        """Fill the host's side of a step; rows beyond the grants' become padding."""
        to = tensors.arrays
        parts = (self.slots[grant.slot].codes(grant) for grant in grants)
        count = sum(grant.num_tokens for grant in grants)
        codes = np.fromiter(chain.from_iterable(parts), np.int64, count)
        fill_rows(to, self.tables, grants, sampling, codes, block_size=self.block_size)
        rules = [self.sampler.rules[grant.slot] for grant in sampling]
        fill(to["temperature_R"], [rule.request.params.temperature for rule in rules], 0.0)
        numbers = [
            0.0 if rule.greedy else plain_uniform(rule.request.seed, grant.start + grant.num_tokens)
            for rule, grant in zip(rules, sampling, strict=True)
        ]
        fill(to["uniform_R"], numbers, 0.0)
        for name, values, rest in self.sampler.cut_offs(rules):
            fill(to[f"{name}_R"], values, rest)

    def _forward(self, tensors: StepTensors, grants: list[Grant]) -> torch.Tensor:
        few = sum(grant.num_tokens <= FEW_QUERIES for grant in grants)
        bounds = (max(g.num_tokens for g in grants), max(g.start + g.num_tokens for g in grants))
        prompts = prompts_of(grants, len(tensors.tokens_T))
        return self._run(tensors, self._batch(tensors, few=few, bounds=bounds, prompts=prompts))

    def _batch(
        self,
        tensors: StepTensors,
        *,
        few: int,
        bounds: tuple[int, int],
        mixed: int | None = None,
        prompts: tuple[Prompt, ...] = (),
    ) -> Batch:
        """Positions, and for each group of layers where keys and values are and go.

        The first `few` sequences have few queries, or with `mixed` those that have so many at most;
        `bounds` are the most queries and tokens; of `prompts` all is known.
        """
        layouts = lay_out(
            self.tables, self.storage,
            rows_B=tensors.rows_B, seq_lens_B=tensors.seq_lens_B, starts_B=tensors.starts_B,
            slots_GT=tensors.slots_GT, few=few, bounds=bounds, mixed=mixed,
            prompts=prompts, kept=self.kept,
        )  # fmt: skip
        paged = self.storage.paged(layouts)
        return Batch(tensors.positions_T, paged, self.last_tokens)
