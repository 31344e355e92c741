"""`LLM`: the engine in this process, in the shape of vLLM's class of that name."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from limelight.checkpoint import locate
from limelight.config import EngineConfig
from limelight.engine.front import Choice, make_requests
from limelight.engine.startup import start_engine
from limelight.progress import Progress
from limelight.text.messages import Message, plain_messages
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import FinishReason, Request, RequestError, SamplingParams, TokenLogprobs

Prompt = str | list[int] | dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position."""

    logprob: float
    rank: int | None
    decoded_token: str


Logprobs = list[dict[int, Logprob] | None]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt; `error` has the words for finish_reason "error"."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the chosen tokens' log-probabilities, where they were asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(candidates[token].logprob for token, candidates in pairs if candidates)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Logprobs | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class Job:
    """A prompt on its way: its choices, and what the prompt itself yields."""

    request_id: str
    prompt: str | None
    requests: list[Request]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached: int = 0
    open: set[int] = field(default_factory=set)


class LLM:
    """One model, loaded in this process. `config` fields are the flags of `limelight serve`."""

    def __init__(self, model: str | None = None, *, quiet: bool = True, **config: object):
        if model is not None:
            config["model"] = model
        unknown = sorted(set(config) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise ValueError(f"LLM has no argument {', '.join(unknown)}")
        self.config = EngineConfig(**config)  # type: ignore[arg-type]
        started = start_engine(self.config, Progress(quiet=quiet))
        self.engine, self.info, self.plan = started.engine, started.info, started.plan
        source = self.config.text_source
        own = source == self.config.model
        folder = started.folder if own else locate(source, weights=False)
        # A model may lack a tokenizer; then it takes and gives token ids.
        has_tokenizer = self.config.tokenizer or (folder / "tokenizer.json").exists()
        self.tokenizer = Tokenizer.load(folder) if has_tokenizer else None
        self.template = ChatTemplate.load(folder, override=None) if has_tokenizer else None
        self._ids = itertools.count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model and its memory; the object is of no use afterwards."""
        if self.template is not None:
            self.template.close()
        self.__dict__.pop("engine", None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The answers to each prompt, in their order.

        A prompt is a text, token ids or {"prompt_token_ids": [...]}; `params` is one for all or
        one for each. An answer that fails has finish_reason "error", and the others go on.
        """
        listed = _as_list(prompts)
        each = _one_each(params or SamplingParams(), len(listed))
        jobs = [self._job(prompt, one) for prompt, one in zip(listed, each, strict=True)]
        for _ in self._run(jobs):
            pass
        return [self._finished(job) for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[Message] | None = None,
        chat_template_kwargs: dict[str, object] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation, or to each of several."""
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations = messages if several else [messages]
        prompts = [
            self.render(conversation, tools=tools, **(chat_template_kwargs or {}))  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self.generate(prompts, params)

    def render(
        self, messages: Sequence[Message], *, tools: list[Message] | None = None, **kwargs: object
    ) -> list[int]:
        """The token ids of a conversation, ready for an answer."""
        if self.template is None or self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no chat template")
        text = self.template.render(plain_messages(messages), tools=tools, **kwargs)  # type: ignore[arg-type]
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
        """The text of one answer, piece by piece; `RuntimeError` if it fails."""
        job = self._job(prompt, replace(params, n=1))
        yield from self._run([job])
        if (error := job.choices[0].error) is not None:
            raise RuntimeError(error)

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        text, ids = self._prompt_ids(prompt)
        request_id = f"llm-{next(self._ids)}"
        requests = make_requests(request_id, ids, params, info=self.info, tokenizer=self.tokenizer)
        choices = [Choice(request, self.tokenizer) for request in requests]
        return Job(request_id, text, requests, choices, open=set(range(len(requests))))

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{self.config.model} has no tokenizer: give token ids")
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        return None, prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt

    def _run(self, jobs: list[Job]) -> Iterator[str]:
        """Step until all jobs are done; the pieces of text as they come."""
        if self.engine.has_work:
            raise RuntimeError("another generate or stream of this LLM is still open")
        owners = {request.id: (job, i) for job in jobs for i, request in enumerate(job.requests)}
        try:
            for job in jobs:
                for request in job.requests:
                    self.engine.add(request)
            while any(job.open for job in jobs):
                for output in self.engine.step():
                    if output.request_id not in owners:
                        continue
                    job, i = owners[output.request_id]
                    if i not in job.open:
                        continue
                    delta = job.choices[i].take(output)
                    if output.prompt_logprobs is not None:
                        job.prompt_logprobs = output.prompt_logprobs
                    job.num_cached = max(job.num_cached, output.num_cached)
                    if delta.finish_reason is not None:
                        job.open.discard(i)
                        if output.finish_reason is None:
                            self.engine.abort(output.request_id)
                    if delta.text:
                        yield delta.text
        finally:
            for job in jobs:
                for i in job.open:
                    self.engine.abort(job.requests[i].id)

    def _finished(self, job: Job) -> RequestOutput:
        outputs = [
            CompletionOutput(
                index=i,
                text=choice.text,
                token_ids=choice.token_ids,
                logprobs=self._logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                error=choice.error,
            )
            for i, choice in enumerate(job.choices)
        ]
        return RequestOutput(
            request_id=job.request_id,
            prompt=job.prompt,
            prompt_token_ids=job.requests[0].prompt_token_ids,
            prompt_logprobs=self._logprobs(job.prompt_logprobs),
            outputs=outputs,
            num_cached_tokens=job.num_cached,
        )

    def _logprobs(self, reports: Sequence[TokenLogprobs | None] | None) -> Logprobs | None:
        if reports is None:
            return None
        return [None if report is None else self._candidates(report) for report in reports]

    def _candidates(self, report: TokenLogprobs) -> dict[int, Logprob]:
        ranked = [(token, logprob, i + 1) for i, (token, logprob) in enumerate(report.top)]
        if all(token != report.token_id for token, _ in report.top):
            ranked.append((report.token_id, report.logprob, report.rank))
        return {
            token: Logprob(
                logprob, rank, self.tokenizer.token_text(token) if self.tokenizer else ""
            )
            for token, logprob, rank in ranked
        }


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> Iterable[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts")
    return params
