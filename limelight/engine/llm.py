"""`LLM`: the engine in this process, in the shape of vLLM's class of that name."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np

from limelight.checkpoint import locate
from limelight.config import EngineConfig, check_parsers
from limelight.engine.front import Choice, Delta, make_requests
from limelight.engine.request_output import CompletionOutput, Logprob, Logprobs, RequestOutput
from limelight.engine.startup import start_engine
from limelight.progress import Progress
from limelight.rl.routing import array
from limelight.text.answer_form import (
    AnswerForm,
    Asked,
    Handling,
    find_form,
    plain_constraint,
    usual_format,
)
from limelight.text.demand import Demand, answer_format
from limelight.text.formats import Format
from limelight.text.messages import Message, plain_messages
from limelight.text.parsers import whole_calls
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import (
    LoRARequest,
    Request,
    RequestError,
    RoutedExperts,
    SamplingParams,
    TokenLogprobs,
)

Prompt = str | list[int] | dict[str, list[int]]


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
    """One model, loaded in this process. `config` fields are the flags of `limelight serve`.

    The parsers (glm47, beam, or auto: what the model writes) take the answers of `chat` apart;
    without them all is text.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        quiet: bool = True,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
        **config: object,
    ):
        check_parsers(reasoning_parser, tool_call_parser)
        if model is not None:
            config["model"] = model
        unknown = sorted(set(config) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise ValueError(f"LLM has no argument {', '.join(unknown)}")
        self.config = EngineConfig(**config)  # type: ignore[arg-type]
        started = start_engine(self.config, Progress(quiet=quiet))
        self.engine, self.info, self.plan = started.engine, started.info, started.plan
        self.template: ChatTemplate | None = None
        try:
            self._load_texts(started.folder, reasoning_parser, tool_call_parser)
        except BaseException:
            self.close()
            raise
        self._ids = itertools.count()

    def _load_texts(
        self, weights: Path, reasoning_parser: str | None, tool_call_parser: str | None
    ) -> None:
        """A model may lack a tokenizer; then it takes and gives token ids."""
        source = self.config.text_source
        folder = weights if source == self.config.model else locate(source, weights=False)
        has_tokenizer = self.config.tokenizer or (folder / "tokenizer.json").exists()
        self.tokenizer = Tokenizer.load(folder) if has_tokenizer else None
        self.template = ChatTemplate.load(folder, override=None) if has_tokenizer else None
        self.form = self._find_form(folder, reasoning_parser, tool_call_parser)

    def _find_form(
        self, folder: Path, reasoning_parser: str | None, tool_call_parser: str | None
    ) -> AnswerForm | None:
        named = [reasoning_parser, tool_call_parser]
        if "auto" in named:
            usual = usual_format(self.info.architecture, folder)
            named = [usual if name == "auto" else name for name in named]
            check_parsers(*named)
        name = named[0] or named[1]
        if name is None:
            return None
        return find_form(
            name, reasoning=named[0] is not None, calls=named[1] is not None,
            folder=folder, tokenizer=self.tokenizer, template=self.template,
        )  # fmt: skip

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
        if (engine := self.__dict__.pop("engine", None)) is not None:
            engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The answers to each prompt, in their order.

        A prompt is a text, token ids or {"prompt_token_ids": [...]}; `params` and `lora_request`
        are one for all or one for each. An answer that fails has finish_reason "error", and the
        others go on.
        """
        listed = _as_list(prompts)
        each = _one_each(params or SamplingParams(), len(listed))
        jobs = [self._plain_job(prompt, one) for prompt, one in zip(listed, each, strict=True)]
        self._adapt(jobs, lora_request)
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation, or to each of several."""
        conversations = _as_conversations(messages)
        each = _one_each(params or SamplingParams(), len(conversations))
        jobs = [
            self._chat_job(conversation, one, tools, chat_template_kwargs or {})
            for conversation, one in zip(conversations, each, strict=True)
        ]
        self._adapt(jobs, lora_request)
        for _ in self._run(jobs):
            pass
        return [self._finished(job) for job in jobs]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        tools: list[Message] | None = None,
        chat_template_kwargs: dict[str, object] | None = None,
    ) -> Iterator[Delta]:
        """The answer to one conversation as it comes; `RuntimeError` if it fails."""
        params = replace(params, n=1)
        yield from self._streamed(
            self._chat_job(messages, params, tools, chat_template_kwargs or {})
        )

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
        for delta in self._streamed(self._plain_job(prompt, replace(params, n=1))):
            if delta.text:
                yield delta.text

    def _streamed(self, job: Job) -> Iterator[Delta]:
        for delta in self._run([job]):
            if delta.refused is not None:
                raise RequestError(delta.refused)
            yield delta
        if (error := job.choices[0].error) is not None:
            raise RuntimeError(error)

    def _adapt(
        self, jobs: list[Job], asked: LoRARequest | Sequence[LoRARequest | None] | None
    ) -> None:
        """Give the jobs their adapters, which are read where their ids are new here."""
        each = [asked] * len(jobs) if asked is None or isinstance(asked, LoRARequest) else asked
        if len(each) != len(jobs):
            raise ValueError(f"{len(each)} adapters for {len(jobs)} prompts")
        for adapter in dict.fromkeys(filter(None, each)):
            if adapter.load_inplace or adapter.lora_int_id not in self.engine.adapters:
                self.engine.load_adapter(adapter)
        ids = [0 if adapter is None else adapter.lora_int_id for adapter in each]
        for job, adapter_id in zip(jobs, ids, strict=True):
            job.requests = [replace(one, adapter_id=adapter_id) for one in job.requests]

    def _plain_job(self, prompt: Prompt, params: SamplingParams) -> Job:
        return self._job(prompt, params, self._plainly(_content(params)))

    def _chat_job(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        tools: list[Message] | None,
        template_kwargs: dict[str, object],
    ) -> Job:
        ids = self.render(messages, tools=tools, **template_kwargs)
        form, content = self.form, _content(params)
        if form is None:
            return self._job(ids, params, self._plainly(content))
        reads = tools if form.calls else None
        asked = Asked(token_ids=ids, tools=reads, template_kwargs=template_kwargs)
        functions = [cast(Message, tool["function"]) for tool in reads or ()]
        demand = Demand(tools=functions, content=content, thinking=asked.thinking)
        constraint = form.constraint(asked, demand)
        waits = constraint is not None and constraint.after_reasoning
        reasoning = form.reasoning(asked) if waits else None
        return self._job(ids, params, Handling(form.parser(asked), constraint, reasoning))

    def _plainly(self, content: Format | None) -> Handling:
        if content is None:
            return Handling()
        if self.tokenizer is None:
            raise RequestError("structured_outputs need a tokenizer, and this model has none")
        return Handling(constraint=plain_constraint(Demand(content=content), self.tokenizer))

    def _job(self, prompt: Prompt, params: SamplingParams, handling: Handling) -> Job:
        text, ids = self._prompt_ids(prompt)
        request_id = f"llm-{next(self._ids)}"
        requests = make_requests(
            request_id, ids, params, info=self.info, tokenizer=self.tokenizer,
            constraint=handling.constraint, reasoning=handling.reasoning,
        )  # fmt: skip
        # The prompt is read once, however many answers it gets.
        parsers = [deepcopy(handling.parser) for _ in requests]
        choices = [
            Choice(request, self.tokenizer, parser)
            for request, parser in zip(requests, parsers, strict=True)
        ]
        return Job(request_id, text, requests, choices, open=set(range(len(requests))))

    def _prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{self.config.model} has no tokenizer: give token ids")
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        if not isinstance(prompt, dict):
            return None, prompt
        if set(prompt) != {"prompt_token_ids"}:
            raise RequestError(f"a prompt has the key prompt_token_ids alone; got {list(prompt)}")
        return None, prompt["prompt_token_ids"]

    def _run(self, jobs: list[Job]) -> Iterator[Delta]:
        """Step until all jobs are done; what the answers say as it comes."""
        if "engine" not in self.__dict__:
            raise RuntimeError("this LLM is closed")
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
                            last = self.engine.abort(output.request_id)
                            if last is not None:
                                job.choices[i].settle(last)
                    yield delta
        finally:
            for job in jobs:
                for i in job.open:
                    self.engine.abort(job.requests[i].id)
            while self.engine.has_work:  # a step that overlaps with the end of all
                self.engine.step()

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
                reasoning=choice.reasoning or None,
                tool_calls=whole_calls(choice.calls),
                routed_experts=_array(choice.routed_experts),
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


def _array(routed: RoutedExperts | None) -> np.ndarray | None:
    return None if routed is None else array(routed)


def _content(params: SamplingParams) -> Format | None:
    """What the content of an answer must be, if anything."""
    asked = params.structured_outputs
    return None if asked is None else answer_format(None, asked.given)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    several = bool(messages) and not isinstance(messages[0], dict)
    return cast(list[Sequence[Message]], list(messages) if several else [messages])


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> Iterable[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts")
    return params
