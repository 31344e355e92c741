"""Reads the pickles that other engines put on their wire, as data: nothing in them is ever called.

A pickle is a program. Here its instructions build lists, tuples and dicts alone; a name stays a
`Name`, and a call of one a `Call` that nobody makes.
"""

import pickletools
from dataclasses import dataclass

LARGEST = 2**27
MARK = object()


@dataclass(frozen=True, slots=True)
class Name:
    """Something that a pickle refers to by its module and name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a pickle would have called, and with what."""

    callee: object
    arguments: object


CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = ("PROTO", "FRAME")
# Those whose argument is the value.
VALUES = frozenset(
    (
        "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
        "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
        "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    )
)  # fmt: skip


def read_pickled(data: bytes) -> object:
    """The value as plain data; `ValueError` for what is no pickle, or builds anything else."""
    if len(data) > LARGEST:
        raise ValueError(f"a pickle of {len(data)} bytes is too large")
    reading = _Reading()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return reading.stack.pop()
            reading.take(opcode.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a pickle of plain data: {error}") from error
    raise ValueError("not a whole pickle")


class _Reading:
    """The stack and the memo of the machine that a pickle is a program for."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def take(self, name: str, argument: object) -> None:
        """One instruction."""
        stack = self.stack
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name == "MARK":
            stack.append(MARK)
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]  # type: ignore[index]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])  # type: ignore[index]
        elif name not in IGNORED:
            self._build(name, argument)

    def _build(self, name: str, argument: object) -> None:
        stack = self.stack
        if name in TUPLES:
            stack.append(tuple(self._last(TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("APPEND", "APPENDS"):
            items = self._last(1) if name == "APPEND" else self._marked()
            _kind(stack[-1], list)
            stack[-1] += items  # type: ignore[operator]
        elif name in ("SETITEM", "SETITEMS"):
            items = self._last(2) if name == "SETITEM" else self._marked()
            _kind(stack[-1], dict)
            stack[-1] |= dict(zip(items[::2], items[1::2], strict=True))  # type: ignore[operator]
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            parts = str(argument).split(" ", 1) if name == "GLOBAL" else self._last(2)
            stack.append(Name(str(parts[0]), str(parts[1])))
        elif name == "REDUCE":
            stack.append(Call(*self._last(2)))
        else:
            raise ValueError(f"not a pickle of plain data: it has the instruction {name}")

    def _last(self, count: int) -> list[object]:
        if len(self.stack) < count:
            raise ValueError("not a whole pickle")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _marked(self) -> list[object]:
        """What stands behind the last mark, which goes too."""
        items: list[object] = []
        # From the top, for below may be much.
        while (item := self.stack.pop()) is not MARK:
            items.append(item)
        return items[::-1]


def _kind(value: object, kind: type) -> None:
    if type(value) is not kind:
        raise ValueError(f"not a pickle of plain data: {type(value).__name__} is no {kind}")
