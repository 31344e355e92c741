"""Two tools that a conversation in the terminal can try: a calculator and the clock."""

import ast
import json
import math
import operator
from collections.abc import Callable
from datetime import datetime
from zoneinfo import ZoneInfo, available_timezones

LONGEST = 200  # characters of an expression
MOST_BITS = 10_000  # of a power, so that none takes long

Tool = dict[str, object]

OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs, "max": max, "min": min, "round": round, "sqrt": math.sqrt, "exp": math.exp,
    "log": math.log, "sin": math.sin, "cos": math.cos, "tan": math.tan,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """The value of an expression of numbers; `ValueError` for anything else."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, UnicodeError, MemoryError, RecursionError) as error:
        raise ValueError("this is no expression that can be read") from error
    except (ArithmeticError, TypeError) as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value) if type(value) in (int, float):
            assert isinstance(value, int | float)
            return value
        case ast.Name(name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.BinOp(left, ast.Pow(), right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(sign, operand) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(operand))
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(_value, arguments))
    raise ValueError(f"{ast.unparse(node)[:50]!r} is not arithmetic")


def _power(base: float, exponent: float) -> float:
    are_whole = isinstance(base, int) and isinstance(exponent, int)
    if are_whole and int(base).bit_length() * abs(exponent) > MOST_BITS:
        raise ValueError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the power is not a real number")
    return value


def get_time(city: str | None = None) -> str:
    """The time, here or in a city that a time zone is named after; JSON, as models expect it."""
    if city is None:
        return _told(datetime.now())
    named = city.strip().replace(" ", "_").casefold()
    zones = [zone for zone in sorted(available_timezones()) if "/" in zone]
    found = [zone for zone in zones if named in (zone.casefold(), zone.split("/")[-1].casefold())]
    if not found:
        raise ValueError(f"no time zone is named after {city[:50]!r}")
    return _told(datetime.now(ZoneInfo(found[-1])))


def _told(now: datetime) -> str:
    return json.dumps({"time": now.strftime("%H:%M")})


TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculate the value of an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "Get the local time, here or in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "additionalProperties": False,
            },
        },
    },
]
PROGRAMS: dict[str, Callable[..., str]] = {"calculate": calculate, "get_time": get_time}


def run_tool(name: str, arguments: str) -> str:
    """The result of a call, for the model; of a call that fails, why."""
    program = PROGRAMS.get(name)
    if program is None:
        return f"error: there is no tool {name[:50]!r}"
    try:
        given = json.loads(arguments)
        if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
            return "error: the arguments must be an object of texts"
        return program(**given)
    except (ValueError, TypeError, OSError, RecursionError) as error:
        return f"error: {error}"
