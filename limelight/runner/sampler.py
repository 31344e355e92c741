"""Logits -> tokens: constraints, bans, bias and penalties, temperature, min-p, top-k, top-p, seeds.

Where the model's logits alone decide the device chooses (`drawing.py`), else it is done here. A
slot's rules are set when its sequence is admitted and hold nothing of the slot's former user. The
random number of a token depends on its seed and position alone: not on slot, step, batch or
preemption.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from limelight.ops.noise import plain_uniform
from limelight.ops.pieces import Cuts
from limelight.ops.sample import GREEDY_BELOW, sample
from limelight.parallel.sampling import Share
from limelight.runner.grammar import Guide, Masks
from limelight.runner.logprobs import NOT_FINITE, Told, Wanted, is_finite, tell
from limelight.runner.transfers import sent
from limelight.types import LogprobsMode, Request, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    import xgrammar

NOT_NUMBERS = "the model's logits are not numbers"
UNCUT = SamplingParams()
NO_GRAMMARS: "Mapping[str, xgrammar.CompiledGrammar]" = MappingProxyType({})


@dataclass(slots=True)
class History:
    """How often each token stands in a sequence's prompt and output, for the penalties."""

    in_prompt_V: torch.Tensor  # bool
    counts_V: torch.Tensor  # FP32, of the output


@dataclass(slots=True)
class Rules:
    """How one slot's tokens are chosen: its request's parameters as the sampler reads them."""

    request: Request
    output: list[int]  # the tokens made so far
    ends: list[int]  # tokens that are banned until min_tokens have been made
    history: History | None = None
    allowed_V: torch.Tensor | None = None  # bool
    bias: tuple[torch.Tensor, torch.Tensor] | None = None  # ids, values
    guide: Guide | None = None
    guided: bool = False  # has a guide, here or on the rank that chooses
    # What never changes and is asked for in every step. Whether the logits are used as they are,
    # but for a guide; whether they alone decide, so that the device can choose by itself; whether
    # the likeliest token is taken, or one of some of the likeliest drawn.
    plain: bool = field(init=False)
    on_device: bool = field(init=False)
    greedy: bool = field(init=False)
    truncated: bool = field(init=False)

    def __post_init__(self):
        params = self.request.params
        self.plain = not (
            self.history
            or self.allowed_V is not None
            or self.bias
            or self.request.bad_words
            or params.min_tokens
        )
        self.on_device = self.plain and not self.guided
        self.greedy = params.temperature < GREEDY_BELOW
        cuts = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.truncated = not self.greedy and cuts

    @property
    def shifts(self) -> bool:
        """Whether `apply` has something to do, which it may at any time for a guide."""
        guide = self.guide
        return not self.plain or (
            guide is not None and (guide.forced is not None or bool(guide.banned))
        )

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are told with its tokens."""
        return self.request.params.logprobs is not None

    @property
    def is_refused(self) -> bool:
        """Whether the last token was one that its guide cannot follow."""
        return self.guide is not None and self.guide.refused is not None

    @property
    def has_left(self) -> bool:
        """The same, or the last token came behind the end."""
        return self.is_refused or self.guide is not None and self.guide.is_behind

    def fork(self) -> "Rules":
        """Rules that go on by themselves from here, for drafts that may have to be taken back."""
        other = copy.copy(self)
        other.output = list(self.output)
        if self.history is not None:
            other.history = History(self.history.in_prompt_V, self.history.counts_V.clone())
        if self.guide is not None:
            other.guide = self.guide.fork()
        return other

    def apply(self, logits_V: torch.Tensor) -> None:
        """Ban, shift and penalize, in place; a budget that is used up goes before all else."""
        params = self.request.params
        if self.allowed_V is not None:
            logits_V.masked_fill_(~self.allowed_V, float("-inf"))
        if len(self.output) < params.min_tokens and self.ends:
            logits_V[self.ends] = float("-inf")
        if self.bias is not None:
            logits_V.index_add_(0, *self.bias)
        for word in self.request.bad_words:
            before = len(word) - 1
            if before == 0 or self.output[-before:] == word[:-1]:
                logits_V[word[-1]] = float("-inf")
        if self.history is not None:
            self._penalize(logits_V, self.history)
        if self.guide is not None:
            if banned := self.guide.banned:
                logits_V[banned] = float("-inf")
            if (forced := self.guide.forced) is not None:
                logits_V.fill_(float("-inf"))
                logits_V[forced] = 0.0

    def _penalize(self, logits_V: torch.Tensor, history: History) -> None:
        params = self.request.params
        made_V = history.counts_V > 0
        repeated_V = made_V | history.in_prompt_V
        penalty = params.repetition_penalty
        lowered_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
        logits_V.copy_(torch.where(repeated_V, lowered_V, logits_V))
        logits_V.sub_(history.counts_V, alpha=params.frequency_penalty)
        logits_V.sub_(made_V.float(), alpha=params.presence_penalty)

    def record(self, token_id: int) -> None:
        self.output.append(token_id)
        if self.guide is not None:
            self.guide.accept(token_id)
        if self.history is not None:
            self.history.counts_V[token_id] += 1


@dataclass(slots=True)
class Run:
    """What a sequence got in one step: the drafts that stood and the token behind them, if any.

    `error` tells what failed, and `refused` what is wrong with the request. `is_whole`: no token
    may follow, and the constraint asks for none.
    """

    token_ids: list[int]
    verified: int = 0
    accepted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    refused: str | None = None
    is_whole: bool = False

    def tell(self, logprobs: list[TokenLogprobs]) -> None:
        """Take over those of its tokens; it ends before the first that is not finite."""
        for one in logprobs:
            if not is_finite(one):
                self.error = self.error or NOT_FINITE
                del self.token_ids[len(self.logprobs) :]
                return
            self.logprobs.append(one)


class Sampler:
    """Chooses the next token of each row by the rules of its slot.

    `grammars` has the compiled constraint of each request that has one, by its id, as long as the
    request lives. Without `chooses` another rank does, and guides are there alone.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        grammars: Mapping[str, "xgrammar.CompiledGrammar"] = NO_GRAMMARS,
        chooses: bool = True,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ):
        self.logprobs_mode = logprobs_mode
        self.vocab_size, self.device, self.chooses = vocab_size, device, chooses
        self.eos_token_ids, self.grammars = eos_token_ids, grammars
        self.rules: dict[int, Rules] = {}
        self._masks: Masks | None = None

    def admit(self, slot: int, request: Request, output: list[int]) -> None:
        """Set the rules of a slot; nothing of its former user stays."""
        params = request.params
        ends = list(params.stop_token_ids or [])
        if not params.ignore_eos:
            ends += self.eos_token_ids
        budget = None if request.reasoning is None else request.reasoning.budget
        guided = request.constraint is not None or budget is not None
        self.rules[slot] = Rules(
            request=request,
            output=list(output),
            ends=ends,
            history=self._history(request, output) if params.needs_history else None,
            allowed_V=self._members(params.allowed_token_ids) if params.allowed_token_ids else None,
            bias=self._bias(params.logit_bias) if params.logit_bias else None,
            guide=self._guide(request, output) if guided and self.chooses else None,
            guided=guided,
        )

    def _guide(self, request: Request, output: list[int]) -> Guide:
        grammar = None if request.constraint is None else self.grammars[request.id]
        return Guide(request, grammar, eos_token_ids=self.eos_token_ids, output=output)

    def _members(self, token_ids: list[int]) -> torch.Tensor:
        members_V = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        members_V[torch.tensor(token_ids, device=self.device)] = True
        return members_V

    def _bias(self, logit_bias: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(list(logit_bias), device=self.device)
        return ids, torch.tensor(list(logit_bias.values()), device=self.device)

    def _history(self, request: Request, output: list[int]) -> History:
        counts_V = torch.bincount(
            torch.tensor(output, dtype=torch.int64), minlength=self.vocab_size
        ).to(self.device, torch.float32)
        return History(self._members(request.prompt_token_ids), counts_V)

    def choose(
        self,
        logits_RV: torch.Tensor,
        slots: list[int],
        positions: list[int],
        *,
        rows: list[int] | None = None,
    ) -> list[Run]:
        """The token that stands at `positions[p]`, from row p of raw FP32 logits, or `rows[p]`."""
        rules = [self.rules[slot] for slot in slots]
        processed_PV = self.processed(logits_RV, rules, rows)
        temperature_R = self.numbers([rule.request.params.temperature for rule in rules])
        numbers = [
            0.0 if rule.greedy else plain_uniform(rule.request.seed, position)
            for rule, position in zip(rules, positions, strict=True)
        ]
        cuts = self.cuts(rules)
        chosen = sample(processed_PV, temperature_R, self.numbers(numbers), cuts=cuts)
        token_ids, best_R = (x.tolist() for x in chosen)
        runs = list(map(self.settle, rules, best_R, token_ids))
        asked = [p for p, rule in enumerate(rules) if rule.reports and runs[p].token_ids]
        ids = [token_ids[p] for p in asked]
        told = self.reports(logits_RV, processed_PV, rules, asked, ids, rows=rows)
        for p, report in zip(asked, told, strict=True):
            runs[p].tell([report])
        return runs

    def settle(self, rule: Rules, best: float, token_id: int) -> Run:
        """What comes of the token that was chosen where the largest logit is `best`."""
        if best != best:
            return Run([], error=NOT_NUMBERS)
        guide = rule.guide
        if best == float("-inf"):
            if guide is not None and guide.is_whole:
                return Run([], is_whole=True)
            return Run([], refused=(guide and guide.refused) or "no token is allowed here")
        rule.record(token_id)
        if guide is not None and guide.refused is not None:
            return Run([], refused=guide.refused)
        return Run([token_id])

    def processed(
        self, logits_RV: torch.Tensor, rules: list[Rules], rows: list[int] | None = None
    ) -> torch.Tensor:
        """The first rows of logits, or `rows`, as each one's rule leaves them; a copy, unless all
        leave them alone."""
        shifting = [p for p, rule in enumerate(rules) if rule.shifts]
        guided = {p: rule.guide for p, rule in enumerate(rules) if rule.guide is not None}
        guided = {p: guide for p, guide in guided.items() if guide.needs_mask}
        if rows is not None:
            processed_PV = logits_RV[sent(rows, torch.int64, self.device)]
        elif shifting or guided:
            processed_PV = logits_RV[: len(rules)].clone()
        else:
            return logits_RV[: len(rules)]
        if guided:
            self._mask(processed_PV, guided)
        for p in shifting:
            rules[p].apply(processed_PV[p])
        return processed_PV

    def _mask(self, logits_RV: torch.Tensor, guided: dict[int, Guide]) -> None:
        """Leave the rows of some guides, in place, what their grammars allow."""
        if self._masks is None:
            self._masks = Masks(vocab_size=self.vocab_size, device=self.device)
        self._masks.apply(logits_RV, list(guided), self._masks.fill(list(guided.values())))

    def cut_offs(self, rules: list[Rules]) -> list[tuple[str, list[int] | list[float], float]]:
        """Each kind's name, its numbers by row, and the one that cuts nothing off, in all rows
        behind those."""
        params: list[SamplingParams] = []
        if any([rule.truncated for rule in rules]):
            params = [rule.request.params if rule.truncated else UNCUT for rule in rules]
        size = self.vocab_size
        return [
            ("top_k", [p.top_k if p.top_k > 0 else size for p in params], size),
            ("top_p", [p.top_p for p in params], 1.0),
            ("min_p", [p.min_p for p in params], 0.0),
        ]

    def cuts(self, rules: list[Rules]) -> Cuts | None:
        """The cut-offs of each row; None where no row has any."""
        if not any(rule.truncated for rule in rules):
            return None
        (_, top_k, _), *others = self.cut_offs(rules)
        top_k_R = sent(top_k, torch.int32, self.device)
        return Cuts(top_k_R, *(self.numbers(values) for _, values, _ in others))

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        """FP32, on the device."""
        return sent(values, torch.float32, self.device)

    def reports(
        self,
        logits_RV: torch.Tensor,
        processed_PV: torch.Tensor,
        rules: list[Rules],
        at: list[int],
        token_ids: list[int],
        *,
        rows: list[int] | None = None,
    ) -> list[TokenLogprobs]:
        """What is told with tokens that came of these of the processed rows, `rows` of the logits,
        each of which has a rule."""
        if not at:
            return []
        raw = self.logprobs_mode.startswith("raw")
        places = [rows[p] for p in at] if raw and rows is not None else at
        rows_X, tokens_X = (sent(x, torch.int64, self.device) for x in (places, token_ids))
        values_RV, each = logits_RV if raw else processed_PV, [rules[p] for p in at]
        return self.tell(values_RV, rows_X, tokens_X, each).reports(range(len(at)), token_ids)

    def tell(
        self,
        logits_RV: torch.Tensor,
        rows_X: torch.Tensor,
        tokens_X: torch.Tensor,
        rules: list[Rules],
        share: Share | None = None,
    ) -> Told:
        """The same while the device may still make the tokens, from logits that are raw or
        processed as the mode wants them; the rest as `logprobs.tell`."""
        raw = self.logprobs_mode.startswith("raw")
        warmths = [1.0 if raw or rule.greedy else rule.request.params.temperature for rule in rules]
        wanted = Wanted(
            counts=[rule.request.params.logprobs or 0 for rule in rules],
            warmths=warmths,
            cuts=None if raw else self.cuts(rules),
            as_logits=self.logprobs_mode.endswith("logits"),
        )
        return tell(logits_RV, rows_X, tokens_X, wanted, vocab_size=self.vocab_size, share=share)
