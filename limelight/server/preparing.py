"""From a question to what the engine is sent and what will read the answers. For threads."""

import copy
import uuid
from dataclasses import dataclass, replace

from limelight.engine.front import make_requests
from limelight.server.bodies import renamed
from limelight.server.http import Call
from limelight.server.openai import Question
from limelight.server.parsing import Handler
from limelight.server.prompts import Prompt, Prompts
from limelight.stats import ModelInfo
from limelight.text.parsers import AnswerParser
from limelight.types import Request, RequestError

# Each choice takes its prompt along to the engine; 64 choices of a prompt of 262,144 tokens.
MOST_PROMPT_TOKENS = 2**24
# Log-probabilities of a prompt that are told more than once; 300 MB of JSON.
MOST_TOLD_AGAIN = 2**22


@dataclass(frozen=True, slots=True)
class Prepared:
    """The prompts, a request for each of their choices, and a parser for each that is parsed."""

    prompts: list[Prompt]
    requests: list[Request]
    parsers: list[AnswerParser]


def prepare(
    question: Question, call: Call, prompts: Prompts, handler: Handler, info: ModelInfo
) -> Prepared:
    """All that is needed to answer; `RequestError` names fields as the body does."""
    # Two clients may choose the same X-Request-Id; the engine must still tell them apart.
    unique = f"{question.id}-{uuid.uuid4().hex[:8]}"
    prepared, num_tokens = Prepared([], [], []), 0
    with renamed(question.field_names):
        demand = handler.demand(question)
        for index, prompt in enumerate(
            prompts.read(question.source, add_special_tokens=question.add_special_tokens)
        ):
            prompt = _truncated(prompt, question, info)
            num_tokens += question.params.n * len(prompt.token_ids)
            if num_tokens > MOST_PROMPT_TOKENS:
                raise RequestError(
                    f"n times the tokens of all prompts must be at most {MOST_PROMPT_TOKENS}",
                    param="n",
                )
            _check_told(prompt, question, info)
            requests = make_requests(
                f"{unique}-{index}", prompt.token_ids, question.params,
                info=info, tokenizer=prompts.tokenizer,
                priority=question.shared.priority, cache_salt=question.shared.cache_salt or "",
                # As its own text, with its own log-probabilities.
                each_tells_prompt=question.echo and question.kind == "completion",
            )  # fmt: skip
            # A prompt is looked at once, however many answers it gets.
            handling = handler.handle(question, demand, prompt)
            prepared.prompts.append(prompt)
            for request in requests:
                prepared.requests.append(
                    replace(
                        request,
                        adapter_id=question.adapter_id,
                        constraint=handling.constraint,
                        reasoning=handling.reasoning,
                        session=call.session,
                        replica=call.replica,
                    )  # fmt: skip
                )
                if handling.parser is not None:
                    prepared.parsers.append(copy.deepcopy(handling.parser))
    return prepared


def _check_told(prompt: Prompt, question: Question, info: ModelInfo):
    """`RequestError` where each of many choices would tell a long prompt's log-probabilities."""
    params = question.params
    if params.prompt_logprobs is None:
        return
    each = info.vocab_size if params.prompt_logprobs == -1 else 1 + params.prompt_logprobs
    if (params.n - 1) * len(prompt.token_ids) * each > MOST_TOLD_AGAIN:
        raise RequestError(
            f"n choices would tell the log-probabilities of one prompt again, more than "
            f"{MOST_TOLD_AGAIN} of them",
            param="prompt_logprobs",
        )


def _truncated(prompt: Prompt, question: Question, info: ModelInfo) -> Prompt:
    """The prompt without what the request lets be cut off."""
    most, limit = question.shared.truncate_prompt_tokens, info.max_model_len
    if most is None:
        return prompt
    if most > limit:
        raise RequestError(
            f"truncate_prompt_tokens must be at most {limit}, which is what this model takes; "
            f"got {most}",
            param="truncate_prompt_tokens",
        )
    if most == -1:
        most = max(1, limit - max(1, question.params.max_tokens or 1))
    if len(prompt.token_ids) <= most:
        return prompt
    cuts_end = question.shared.truncation_side == "right"
    return Prompt(prompt.token_ids[:most] if cuts_end else prompt.token_ids[-most:], None)
