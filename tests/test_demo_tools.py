import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limelight.demo_tools import PROGRAMS, TOOLS, calculate, get_time, run_tool


def call(name, **arguments):
    return run_tool(name, json.dumps(arguments))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17 + 25", "42"), (" 2 * (3 - 5) ", "-4"), ("7 / 2", "3.5"), ("7 // 2", "3"),
        ("-7 % 3", "2"), ("2 ** 10", "1024"), ("2 ** -1", "0.5"), ("sqrt(16) + abs(-1)", "5.0"),
        ("round(pi, 2)", "3.14"), ("max(1, 2, 3)", "3"), ("+1", "1"),
    ],
)  # fmt: skip
def test_arithmetic_is_calculated(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1 / 0", "zero"), ("2 ** 99999999", "too large"), ("9 ** 9 ** 9 ** 9", "too large"),
        ("(-1) ** 0.5", "not a real number"), ("1e308 * 10 // 1", ""), ("sqrt(-1)", ""),
        ("2.0 ** 99999", ""), ("abs()", ""), ("round(1, 2, 3)", ""), ("", "no expression"),
        ("1 +", "no expression"), ("(" * 190, "no expression"), ("1" * 500, "longer than 200"),
        ("__import__('os')", "not arithmetic"), ("().__class__", "not arithmetic"),
        ("'a' * 9", "not arithmetic"), ("True + 1", "not arithmetic"), ("[1][0]", "not arithmetic"),
        ("1 << 99999", "not arithmetic"), ("max(*[1])", "not arithmetic"), ("x", "not arithmetic"),
        ("abs(x=1)", "not arithmetic"), ("1; 2", "no expression"), ("3j", "not arithmetic"),
        ("a\x00b", "no expression"), ("\ud800", "no expression"),
        ("*".join(["9**3000"] * 25), ""), ("-" * 199 + "1", ""),
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_much_is_refused_in_no_time(expression, words):
    start = time.process_time()
    answer = call("calculate", expression=expression)
    assert time.process_time() - start < 1
    if words:
        assert answer.startswith("error: ") and words in answer
    else:
        assert isinstance(answer, str)


@settings(max_examples=200, deadline=None)
@given(st.text("0123456789+-*/%(). episqrtabmx,", max_size=40) | st.text(max_size=20))
def test_no_expression_does_more_than_answer(expression):
    assert isinstance(call("calculate", expression=expression), str)


def test_the_time_is_told_here_and_in_a_city():
    for city in (None, "Oslo", "oslo", "Europe/Oslo", " New York"):
        hours, minutes = map(int, json.loads(get_time(city))["time"].split(":"))
        assert 0 <= hours < 24 and 0 <= minutes < 60
    times = {get_time(city) for city in ("Tokyo", "Oslo", "New York")}
    assert len(times) == 3
    with pytest.raises(ValueError, match="'Bonn'"):
        get_time("Bonn")


@pytest.mark.parametrize("city", ["../../etc/passwd", "/", "", "\x00", "x" * 10_000])
def test_a_city_is_only_looked_up_by_name(city):
    assert call("get_time", city=city).startswith("error: no time zone")


def test_a_call_that_makes_no_sense_is_told_to_the_model():
    assert "no tool 'fly'" in call("fly")
    assert call("calculate", expression=3) == "error: the arguments must be an object of texts"
    assert call("calculate").startswith("error: ")
    for arguments in ("", "{", "[]", "3", "[" * 100_000):
        assert run_tool("calculate", arguments).startswith("error: ")
    assert call("get_time", planet="Mars").startswith("error: ")


def test_each_tool_is_described_with_the_arguments_that_it_takes():
    described = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    assert set(described) == set(PROGRAMS)
    for name, program in PROGRAMS.items():
        code = program.__code__
        assert tuple(described[name]["properties"]) == code.co_varnames[: code.co_argcount]
