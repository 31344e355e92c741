"""`LLM` with parsers and constraints: reasoning, content and calls of the bundled models."""

import json

import jsonschema
import pytest
from weather import TOOLS

from limelight import LLM, SamplingParams, StructuredOutputsParams
from limelight.types import RequestError

WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "ok": {"enum": ["yes", "no"]}},
    "required": ["sum", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(
    scope="module", params=["flint-nano", pytest.param("beam-nano", marks=pytest.mark.slow)]
)
def llm(request):
    with LLM(
        request.param, device="cpu", max_num_seqs=8,
        reasoning_parser="auto", tool_call_parser="auto",
    ) as made:  # fmt: skip
        yield made


def wild(**fields):
    return SamplingParams(
        temperature=1.5, seed=1, max_tokens=100,
        structured_outputs=StructuredOutputsParams(**fields), n=3,
    )  # fmt: skip


def test_a_call_is_read_and_its_result_goes_back_as_a_message(llm):
    [answer] = llm.chat(WEATHER, GREEDY, tools=TOOLS, chat_template_kwargs=OFF)
    [one] = answer.outputs
    [call] = one.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    assert (one.text, one.reasoning, one.finish_reason) == ("", None, "stop")
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain, 7 degrees"}
    messages = [*WEATHER, one.message, result]
    [answer] = llm.chat(messages, GREEDY, tools=TOOLS, chat_template_kwargs=OFF)
    [one] = answer.outputs
    assert one.tool_calls == [] and one.text and "<" not in one.text
    assert one.message == {"role": "assistant", "content": one.text}


def test_a_stream_adds_up_to_the_whole_answer(llm):
    [answer] = llm.chat(WEATHER, GREEDY, tools=TOOLS, chat_template_kwargs=ON)
    [one] = answer.outputs
    assert one.reasoning and one.message["reasoning"] == one.reasoning
    deltas = list(llm.stream_chat(WEATHER, GREEDY, tools=TOOLS, chat_template_kwargs=ON))
    assert "".join(delta.text for delta in deltas) == one.text
    assert "".join(delta.reasoning for delta in deltas) == one.reasoning
    pieces = [piece for delta in deltas for piece in delta.calls]
    assert "".join(piece.arguments for piece in pieces) == one.tool_calls[0].arguments
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]


def test_several_conversations_and_choices_are_read_each_by_itself(llm):
    params = SamplingParams(temperature=0.0, max_tokens=200, n=2)
    several = llm.chat([WEATHER, SUM], params, tools=TOOLS)
    calls, plain = ([one.tool_calls for one in answer.outputs] for answer in several)
    assert all(len(each) == 1 for each in calls) and calls[0][0].id != calls[1][0].id
    assert plain == [[], []]


def test_a_call_that_is_cut_short_is_left_out(llm):
    [answer] = llm.chat(WEATHER, GREEDY, tools=TOOLS, chat_template_kwargs=OFF)
    length = len(answer.outputs[0].token_ids)
    for cut in range(1, length - 2, 4):
        params = SamplingParams(temperature=0.0, max_tokens=cut)
        [answer] = llm.chat(WEATHER, params, tools=TOOLS, chat_template_kwargs=OFF)
        [one] = answer.outputs
        assert (one.tool_calls, one.text, one.finish_reason) == ([], "", "length")


def test_without_tools_nothing_is_a_call(llm):
    [one] = llm.chat(SUM, GREEDY)[0].outputs
    assert one.tool_calls == [] and "42" in one.text


@pytest.mark.parametrize("kwargs", [ON, OFF], ids=str)
def test_the_content_of_a_chat_is_what_was_asked_for_and_thoughts_are_free(llm, kwargs):
    [answer] = llm.chat(SUM, wild(json=SCHEMA), chat_template_kwargs=kwargs)
    finished = [one for one in answer.outputs if one.finish_reason == "stop"]
    for one in finished:
        jsonschema.validate(json.loads(one.text), SCHEMA)
        assert bool(one.reasoning) == kwargs["enable_thinking"]
    assert finished or kwargs is ON


def test_a_text_goes_on_as_was_asked_for(llm):
    for asked, pattern in (
        ({"choice": ["red", "green"]}, "red|green"),
        ({"regex": "[0-9]{3}-[a-f]"}, "[0-9]{3}-[a-f]"),
    ):
        [answer] = llm.generate("Once upon", wild(**asked))
        for one in answer.outputs:
            jsonschema.validate(one.text, {"type": "string", "pattern": f"^({pattern})$"})
            assert one.finish_reason == "stop"
    text = "".join(llm.stream("Once upon", wild(json=json.dumps(SCHEMA))))
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "fields", [{}, {"json": SCHEMA, "regex": "a"}, {"choice": []}, {"regex": "("}], ids=str
)
def test_what_cannot_be_asked_for_is_refused(llm, fields):
    with pytest.raises(RequestError) as caught:
        llm.generate("a", wild(**fields))
    assert caught.value.param == "structured_outputs"
    assert not llm.engine.has_work


def test_what_the_compiler_refuses_is_told(llm):
    asked = wild(grammar="root ::= nothing")
    with pytest.raises(RequestError, match="nothing"):
        list(llm.stream("a", asked))
    [refused] = llm.generate("a", asked)
    assert {one.finish_reason for one in refused.outputs} == {"error"}
    assert all("nothing" in one.error for one in refused.outputs)
    assert not llm.engine.has_work


def test_what_is_asked_for_must_be_of_its_class():
    with pytest.raises(RequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": SCHEMA})


@pytest.mark.parametrize(
    ("parsers", "words"),
    [
        ({"reasoning_parser": "glm46"}, "no parser 'glm46'"),
        ({"reasoning_parser": "beam", "tool_call_parser": "glm47"}, "together"),
        ({"tool_call_parser": "beam"}, "together"),
    ],
    ids=str,
)
def test_parsers_that_do_not_exist_or_go_together_are_refused_at_once(parsers, words):
    with pytest.raises(ValueError, match=words):
        LLM("no-such-model", **parsers)


@pytest.mark.slow
def test_a_parser_that_the_model_cannot_have_is_refused():
    with pytest.raises(ValueError, match="response_template"):
        LLM(
            "flint-nano", device="cpu", load_format="dummy",
            reasoning_parser="beam", tool_call_parser="beam",
        )  # fmt: skip
