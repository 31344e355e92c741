"""Logits -> tokens: constraints, bans, bias and penalties, temperature, min-p, top-k, top-p, seeds.

Where the model's logits alone decide the device chooses (`drawing.py`), else it is done here. A
slot's rules are set when its sequence is admitted and hold nothing of the slot's former user. The
random number of a token depends on its seed and position alone: not on slot, step, batch or
preemption.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from limelight.ops.noise import plain_uniform
from limelight.ops.pieces import Cuts
from limelight.ops.sample import GREEDY_BELOW
from limelight.ops.verify import NOTHING
from limelight.parallel.sampling import Share, sample_share
from limelight.runner.grammar import Guide
from limelight.runner.logprobs import NOT_FINITE, Told, Wanted, is_finite, tell
from limelight.runner.masks import Led, Masks
from limelight.runner.transfers import sent
from limelight.types import LogprobsMode, Request, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    import xgrammar

NOT_NUMBERS = "the model's logits are not numbers"
UNCUT = SamplingParams()
NO_GRAMMARS: "Mapping[str, xgrammar.CompiledGrammar]" = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Span:
    """The part of the vocabulary whose logits are here: `size` tokens from `first` on."""

    first: int
    size: int

    def places(self, token_ids: Iterable[int]) -> list[int]:
        """Where those of these tokens lie that are in it."""
        places = (token_id - self.first for token_id in token_ids)
        return [place for place in places if 0 <= place < self.size]


@dataclass(slots=True)
class History:
    """How often each token of the span stands in a prompt and its output, for the penalties."""

    in_prompt_S: torch.Tensor  # bool
    counts_S: torch.Tensor  # FP32, of the output


@dataclass(slots=True)
class Rules:
    """How one slot's tokens are chosen: its request's parameters as the sampler reads them."""

    request: Request
    span: Span
    output: list[int]  # the tokens made so far
    ends: list[int]  # tokens that are banned until min_tokens have been made
    history: History | None = None
    allowed_S: torch.Tensor | None = None  # bool
    bias: tuple[torch.Tensor, torch.Tensor] | None = None  # places in the span, values
    guide: Guide | None = None
    guided: bool = False  # has a guide, here or on rank 0
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
            or self.allowed_S is not None
            or self.bias
            or self.request.bad_words
            or params.min_tokens
        )
        self.on_device = self.plain and not self.guided
        self.greedy = params.temperature < GREEDY_BELOW
        cuts = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.truncated = not self.greedy and cuts

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
            other.history = History(self.history.in_prompt_S, self.history.counts_S.clone())
        if self.guide is not None:
            other.guide = self.guide.fork()
        return other

    def apply(self, logits_S: torch.Tensor) -> None:
        """Ban, shift and penalize, in place."""
        span = self.span
        if self.allowed_S is not None:
            logits_S.masked_fill_(~self.allowed_S, float("-inf"))
        if self.bias is not None:
            logits_S.index_add_(0, *self.bias)
        if banned := span.places(self._banned()):
            # At once, and without waiting for the device.
            logits_S.index_fill_(0, sent(banned, torch.int64, logits_S.device), float("-inf"))
        if self.history is not None:
            self._penalize(logits_S, self.history)

    def _banned(self) -> Iterable[int]:
        """Tokens that may not come next: ends that are too early, and the last of bad words."""
        if len(self.output) < self.request.params.min_tokens:
            yield from self.ends
        for word in self.request.bad_words:
            before = len(word) - 1
            if before == 0 or self.output[-before:] == word[:-1]:
                yield word[-1]

    def _penalize(self, logits_S: torch.Tensor, history: History) -> None:
        params = self.request.params
        made_S = history.counts_S > 0
        repeated_S = made_S | history.in_prompt_S
        penalty = params.repetition_penalty
        lowered_S = torch.where(logits_S > 0, logits_S / penalty, logits_S * penalty)
        logits_S.copy_(torch.where(repeated_S, lowered_S, logits_S))
        logits_S.sub_(history.counts_S, alpha=params.frequency_penalty)
        logits_S.sub_(made_S.float(), alpha=params.presence_penalty)

    def record(self, token_id: int) -> None:
        self.output.append(token_id)
        if self.guide is not None:
            self.guide.accept(token_id)
        if self.history is not None:
            for place in self.span.places([token_id]):
                self.history.counts_S[place] += 1


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

    @property
    def end(self) -> tuple[int, int]:
        """How many drafts stood, and the last token; NOTHING without."""
        return (self.accepted, self.token_ids[-1]) if self.token_ids else (0, NOTHING)

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
    request lives. With a `share` of the vocabulary all its ranks choose together, each with the
    logits of its own tokens; guides are on rank 0 alone.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        grammars: Mapping[str, "xgrammar.CompiledGrammar"] = NO_GRAMMARS,
        share: Share | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ):
        self.logprobs_mode = logprobs_mode
        self.vocab_size, self.device, self.share = vocab_size, device, share
        self.span = Span(0, vocab_size) if share is None else Span(share.first, share.size)
        self.eos_token_ids, self.grammars = eos_token_ids, grammars
        self.rules: dict[int, Rules] = {}
        self.masks = Masks(vocab_size=vocab_size, device=device, share=share)

    def admit(self, slot: int, request: Request, output: list[int]) -> None:
        """Set the rules of a slot; nothing of its former user stays."""
        params = request.params
        ends = list(params.stop_token_ids or [])
        if not params.ignore_eos:
            ends += self.eos_token_ids
        budget = None if request.reasoning is None else request.reasoning.budget
        guided = request.constraint is not None or budget is not None
        has_guides = self.share is None or self.share.mesh.rank == 0
        self.rules[slot] = Rules(
            request=request,
            span=self.span,
            output=list(output),
            ends=ends,
            history=self._history(request, output) if params.needs_history else None,
            allowed_S=self._members(params.allowed_token_ids) if params.allowed_token_ids else None,
            bias=self._bias(params.logit_bias) if params.logit_bias else None,
            guide=self._guide(request, output) if guided and has_guides else None,
            guided=guided,
        )

    def _guide(self, request: Request, output: list[int]) -> Guide:
        grammar = None if request.constraint is None else self.grammars[request.id]
        return Guide(request, grammar, eos_token_ids=self.eos_token_ids, output=output)

    def _members(self, token_ids: list[int]) -> torch.Tensor:
        members_S = torch.zeros(self.span.size, dtype=torch.bool, device=self.device)
        members_S[self._places(token_ids)] = True
        return members_S

    def _places(self, token_ids: Iterable[int]) -> torch.Tensor:
        return torch.tensor(self.span.places(token_ids), dtype=torch.int64, device=self.device)

    def _bias(self, logit_bias: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
        own = {id_: value for id_, value in logit_bias.items() if self.span.places([id_])}
        values = torch.tensor(list(own.values()), dtype=torch.float32, device=self.device)
        return self._places(own), values

    def _history(self, request: Request, output: list[int]) -> History:
        places = torch.tensor(self.span.places(output), dtype=torch.int64)
        counts_S = torch.bincount(places, minlength=self.span.size)
        counts_S = counts_S.to(self.device, torch.float32)
        return History(self._members(request.prompt_token_ids), counts_S)

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
        numbers_R = self.numbers(numbers)
        chosen = sample_share(processed_PV, temperature_R, numbers_R, self.share, cuts=cuts)
        token_ids, best_R = (x.tolist() for x in chosen)
        runs = list(map(self.settle, rules, best_R, token_ids))
        # All ranks have to tell of the same rows, also where a guide, which not all have, refuses.
        asked = [p for p, rule in enumerate(rules) if rule.reports]
        ids = [token_ids[p] for p in asked]
        told = self.reports(logits_RV, processed_PV, rules, asked, ids, rows=rows)
        for p, report in zip(asked, told, strict=True):
            if runs[p].token_ids:
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
        shifting = [p for p, rule in enumerate(rules) if not rule.plain]
        led = [
            Led.by(rule.guide, p, constrained=rule.request.constraint is not None)
            for p, rule in enumerate(rules)
            if rule.guided
        ]
        led = [one for one in led if one.speaks or self.share is not None]
        if rows is not None:
            processed_PV = logits_RV[sent(rows, torch.int64, self.device)]
        elif shifting or led:
            processed_PV = logits_RV[: len(rules)].clone()
        else:
            return logits_RV[: len(rules)]
        self.masks.mask(processed_PV, led)
        for p in shifting:
            rules[p].apply(processed_PV[p])
        # A budget that is used up goes before all else.
        self.masks.force(processed_PV, led)
        return processed_PV

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
        return tell(
            logits_RV, rows_X, tokens_X, wanted, vocab_size=self.vocab_size, share=self.share
        )
