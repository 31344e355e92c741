"""The metrics, under the names that dashboards for vLLM read; nothing else knows these names."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from limelight.orders import WEIGHTS, EngineState
from limelight.stats import EngineStats, ModelInfo, SpeculationStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
LABELS = ("model_name", "engine")
ENGINE = "0"
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5)) + (10**6,)
CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Everything that `/metrics` shows of one model, in a registry of its own.

    `stats`, of each engine, `info` and `state` are asked at each scrape; `info` gives None until
    the model is loaded. What is counted by request stands under the first engine.
    """

    def __init__(
        self,
        model: str,
        *,
        stats: Callable[[], Sequence[EngineStats]],
        info: Callable[[], ModelInfo | None],
        state: Callable[[], EngineState] = EngineState,
    ):
        self.registry = CollectorRegistry()
        self._labels = (model, ENGINE)
        self.registry.register(_EngineCollector(model, stats, info, state))
        ProcessCollector(registry=self.registry)
        self._make_counters()
        self._make_histograms()

    def _make_counters(self):
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken in")
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that the prefix cache gave"
        )
        self.tokens_by_source = self._counters(
            "prompt_tokens_by_source", "Prompt tokens by where they came from", "source"
        )
        self.generated_tokens = self._counter("generation_tokens", "Tokens generated")
        self.finished = self._counters(
            "request_success", "Sequences that ended, by reason", "finished_reason"
        )
        self.rejected = self._counters(
            "admission_rejections", "Requests refused at the door, by reason", "reason"
        )
        self.calls_read = self._counters(
            "tool_call_parser_invocations", "Choices that were read for calls of tools",
            "mode", "outcome", "request_type",
        )  # fmt: skip
        self.http_requests = Counter(
            "http_requests", "HTTP requests", ("handler", "method", "status"),
            registry=self.registry,
        )  # fmt: skip

    def _make_histograms(self):
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", SECONDS
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Time between outputs of a sequence", SECONDS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", SECONDS
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token", SECONDS
        )
        self.queued = self._histogram(
            "request_queue_time_seconds", "Arrival to first grant", SECONDS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "First grant to first token", SECONDS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "First token to last token", SECONDS
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "First grant to last token", SECONDS
        )
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a sequence", TOKENS
        )
        self.answer_length = self._histogram(
            "request_generation_tokens", "Tokens generated for a sequence", TOKENS
        )
        self.max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of a sequence", TOKENS
        )
        self.choices = self._histogram("request_params_n", "n of a request", CHOICES)
        self.http_seconds = Histogram(
            "http_request_duration_seconds", "Time to answer an HTTP request",
            ("handler", "method"), buckets=SECONDS, registry=self.registry,
        )  # fmt: skip

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"vllm:{name}", help, LABELS, registry=self.registry).labels(*self._labels)

    def _counters(self, name: str, help: str, *labels: str) -> Callable[..., Counter]:
        family = Counter(f"vllm:{name}", help, (*LABELS, *labels), registry=self.registry)
        return lambda *values: family.labels(*self._labels, *values)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", help, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(*self._labels)

    def http(self, handler: str, method: str, status: int, seconds: float):
        """One HTTP request answered; statuses count by hundreds, as the dashboards expect."""
        self.http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self.http_seconds.labels(handler, method).observe(seconds)

    def render(self) -> bytes:
        """All of it in Prometheus' text form, of media type `CONTENT_TYPE`."""
        return generate_latest(self.registry)


class SequenceTimes:
    """The life of one sequence, as its outputs show it, told to the metrics."""

    def __init__(self, metrics: Metrics, *, arrival: float, num_prompt: int, max_tokens: int):
        self.metrics = metrics
        self.arrival = arrival
        self.num_prompt = num_prompt
        self.num_generated = 0
        self.queued = 0.0
        self.first: float | None = None
        self.last = arrival
        metrics.max_tokens.observe(max_tokens)

    def output(self, num_tokens: int, *, queued: float, num_cached: int):
        """News with `num_tokens` new tokens; `queued` seconds passed before the first grant."""
        now = time.monotonic()
        if self.first is None:
            self._first_output(now, queued, num_cached)
        else:
            self.metrics.between_tokens.observe(now - self.last)
        self.last = now
        self.num_generated += num_tokens
        self.metrics.generated_tokens.inc(num_tokens)

    def _first_output(self, now: float, queued: float, num_cached: int):
        self.first, self.queued = now, queued
        self.metrics.first_token.observe(now - self.arrival)
        self.metrics.queued.observe(queued)
        self.metrics.prefill.observe(max(0.0, now - self.arrival - queued))
        self.metrics.prompt_length.observe(self.num_prompt)
        self.metrics.prompt_tokens.inc(self.num_prompt)
        self.metrics.cached_tokens.inc(num_cached)
        self.metrics.tokens_by_source("local_cache_hit").inc(num_cached)
        self.metrics.tokens_by_source("local_compute").inc(self.num_prompt - num_cached)

    def end(self, reason: str):
        """The sequence is over, for whatever reason."""
        self.metrics.finished(reason).inc()
        if self.first is None:
            return
        decode = self.last - self.first
        self.metrics.end_to_end.observe(self.last - self.arrival)
        self.metrics.decode.observe(decode)
        self.metrics.inference.observe(max(0.0, self.last - self.arrival - self.queued))
        self.metrics.answer_length.observe(self.num_generated)
        if self.num_generated > 1:
            self.metrics.per_token.observe(decode / (self.num_generated - 1))


class _EngineCollector(Collector):
    """What the engines themselves count, read at each scrape."""

    def __init__(
        self,
        model: str,
        stats: Callable[[], Sequence[EngineStats]],
        info: Callable[[], ModelInfo | None],
        state: Callable[[], EngineState],
    ):
        self.model = model
        self.stats, self.info, self.state = stats, info, state

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        each = self.stats()

        def of(field: str) -> list[float]:
            return [getattr(one, field) for one in each]

        always = [1] * len(each)
        yield self._gauge("num_requests_running", "Sequences in the step", of("running"))
        yield self._gauge("num_requests_waiting", "Sequences that wait for room", of("waiting"))
        yield self._gauge(
            "num_requests_waiting_by_reason", "Sequences that wait, by reason", of("waiting"),
            reason="capacity",
        )  # fmt: skip
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1", of("cache_usage"))
        yield self._sleep_state(len(each))
        yield self._counter("num_preemptions", "Sequences put back", of("preemptions"))
        yield self._counter("prefix_cache_queries", "Tokens looked up", of("prefix_queries"))
        yield self._counter("prefix_cache_hits", "Tokens found", of("prefix_hits"))
        yield self._step_tokens(each)
        yield from self._expert_tokens(each)
        drafting = [(engine, one.speculation) for engine, one in enumerate(each)]
        yield from self._speculation([(e, one) for e, one in drafting if one is not None])
        if (info := self.info()) is not None:
            yield self._gauge(
                "cache_config_info", "The KV cache", always,
                block_size=str(info.block_size), num_gpu_blocks=str(info.num_blocks),
            )  # fmt: skip

    def _sleep_state(self, engines: int) -> Metric:
        """They sleep and wake together."""
        state = self.state()
        present = "awake"
        if state.asleep:
            is_lost = WEIGHTS in state.asleep and state.incomplete is not None
            present = "discard_all" if is_lost else "weights_offloaded"
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the present state", labels=(*LABELS, "sleep_state")
        )
        for engine in range(engines):
            for name in ("awake", "weights_offloaded", "discard_all"):
                family.add_metric([self.model, str(engine), name], name == present)
        return family

    def _expert_tokens(self, each: Sequence[EngineStats]) -> Iterator[Metric]:
        """Of the engines that count them."""
        if not any(one.expert_tokens for one in each):
            return
        family = CounterMetricFamily(
            "vllm:expert_tokens", "Tokens that were routed to an expert, over all layers",
            labels=(*LABELS, "expert"),
        )  # fmt: skip
        for engine, one in enumerate(each):
            for expert, tokens in enumerate(one.expert_tokens):
                family.add_metric([self.model, str(engine), str(expert)], tokens)
        yield family

    def _speculation(self, each: list[tuple[int, SpeculationStats]]) -> Iterator[Metric]:
        """Of the engines that draft."""
        for name, help, field in (
            ("num_drafts", "Verifications with a draft at least", "steps"),
            ("num_draft_tokens", "Drafts that were verified", "verified"),
            ("num_offered_tokens", "Drafts that could have been verified", "offered"),
            ("num_made_tokens", "Drafts that the drafter made", "drafted"),
            ("num_accepted_tokens", "Drafts that were accepted", "accepted"),
            ("predicted_accepted_tokens", "Verified drafts by their chance", "predicted"),
        ):
            yield self._counter(f"spec_decode_{name}", help, *_each(each, field))
        for kind, name, help, field in (
            (CounterMetricFamily, "num_draft_tokens_per_pos", "Drafts verified", "verified_at"),
            (CounterMetricFamily, "num_accepted_tokens_per_pos", "Accepted", "accepted_at"),
            (GaugeMetricFamily, "intercept", "Of acceptance", "intercepts"),
        ):
            family = kind(
                f"vllm:spec_decode_{name}", f"{help}, by place", labels=(*LABELS, "position")
            )
            for engine, one in each:
                for place, value in enumerate(getattr(one, field)):
                    family.add_metric([self.model, str(engine), str(place)], value)
            yield family
        for name, help, field in (
            ("budget", "Drafts verified in the last step", "budget"),
            ("other_rows", "Its other rows", "rows"),
            ("drafting", "1: the drafter works", "drafting"),
            ("synthetic", "1: accepted at told rates", "synthetic"),
            ("slope", "Of acceptance by log odds", "slope"),
        ):
            yield self._gauge(f"spec_decode_{name}", help, *_each(each, field))

    def _gauge(
        self,
        name: str,
        help: str,
        values: Sequence[float],
        engines: Sequence[int] | None = None,
        **labels: str,
    ) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help, labels=(*LABELS, *labels))
        for engine, value in zip(engines or range(len(values)), values, strict=True):
            family.add_metric([self.model, str(engine), *labels.values()], value)
        return family

    def _counter(
        self, name: str, help: str, values: Sequence[float], engines: Sequence[int] | None = None
    ) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help, labels=LABELS)
        for engine, value in zip(engines or range(len(values)), values, strict=True):
            family.add_metric([self.model, str(engine)], value)
        return family

    def _step_tokens(self, each: Sequence[EngineStats]) -> Metric:
        # The engine reports sums, so the one bucket that is known holds all steps.
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of an engine step", labels=LABELS
        )
        for engine, one in enumerate(each):
            family.add_metric([self.model, str(engine)], [("+Inf", one.steps)], one.step_tokens)
        return family


def _each(each: list[tuple[int, SpeculationStats]], field: str) -> tuple[list[float], list[int]]:
    """A field's values, and whose they are."""
    return [getattr(one, field) for _, one in each], [engine for engine, _ in each]
