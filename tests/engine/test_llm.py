"""`LLM`: answers that fail alone, prompts without an answer, and messages as clients send them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from limelight import LLM, SamplingParams
from limelight.steps import StepResult

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 17}}}
QUESTION = {"role": "user", "content": "What is 17 + 25?"}


@pytest.fixture(scope="module")
def llm():
    with LLM("flint-nano", device="cpu", load_format="dummy", max_num_seqs=8) as made:
        yield made


@pytest.fixture
def failing(llm, monkeypatch):
    """The third token of every sequence whose prompt begins with token 7 is an error."""
    launch, prompts = llm.engine.runner.launch, {}

    def launch_and_fail(plan):
        prompts.update({one.slot: one.request.prompt_token_ids for one in plan.admissions})
        third = {g.slot for g in plan.grants if g.start == len(prompts[g.slot]) + 1}
        bad = {slot for slot in third if prompts[slot][0] == 7}
        launched = launch(plan)

        def result():
            sampled = launched.result().sampled
            return StepResult([broken(one) if one.slot in bad else one for one in sampled])

        return SimpleNamespace(result=result)

    def broken(sampled):
        return replace(sampled, token_ids=[], logprobs=None, error="not a number")

    monkeypatch.setattr(llm.engine.runner, "launch", launch_and_fail)


def test_an_answer_that_fails_keeps_its_words_and_the_others_complete(llm, failing):
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=2)
    good, bad, after = llm.generate([[5, 6], [7, 6], [8]], params)
    for one in bad.outputs:
        assert (one.finish_reason, one.error, len(one.token_ids)) == ("error", "not a number", 2)
    for one in good.outputs + after.outputs:
        assert (one.finish_reason, one.error, len(one.token_ids)) == ("length", None, 6)
    assert not llm.engine.has_work


def test_a_stream_that_fails_raises_its_words(llm, failing):
    with pytest.raises(RuntimeError, match="not a number"):
        list(llm.stream([7, 7], SamplingParams(max_tokens=6, ignore_eos=True)))
    assert not llm.engine.has_work


@pytest.mark.parametrize("chunk", [[5], list(range(5, 100))], ids=len)
def test_no_token_is_made_where_none_is_asked_for(llm, chunk):
    params = SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=0)
    (answer,) = llm.generate([chunk], params)
    (one,) = answer.outputs
    assert (one.token_ids, one.text, one.finish_reason) == ([], "", "length")
    assert not one.logprobs and len(answer.prompt_logprobs) == len(chunk)


def test_earlier_calls_may_have_their_arguments_as_json(llm):
    function = {"name": "add", "arguments": '{"a": 17}'}
    written, read = (
        llm.render([QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}])
        for call in (CALL | {"function": function}, CALL)
    )
    assert written == read


def test_a_conversation_is_refused_by_the_message_that_is_wrong(llm):
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls\[0\].*JSON object"):
        broken = CALL | {"function": {"name": "add", "arguments": "[1]"}}
        llm.chat([QUESTION, {"role": "assistant", "tool_calls": [broken]}])


def test_a_prompt_that_is_none_is_refused_by_its_keys(llm):
    with pytest.raises(ValueError, match="the key prompt_token_ids alone; got .'prompt'"):
        llm.generate({"prompt": "Hi"})


def test_a_closed_model_says_so():
    with LLM("flint-nano", device="cpu", load_format="dummy", max_num_seqs=1) as llm:
        pass
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate([[5]])


def test_an_engine_whose_texts_cannot_be_read_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr("limelight.engine.engine.Engine.close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="beam"):
        LLM(
            "flint-nano", device="cpu", load_format="dummy",
            reasoning_parser="beam", tool_call_parser="beam",
        )  # fmt: skip
    assert len(closed) == 1
