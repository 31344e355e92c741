"""The header of a GGUF file: what it says of itself, and which tensors lie where.

Of the metadata the values are kept, but only those arrays that are asked for: the vocabulary of a
tokenizer is passed over.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9
# A header beyond these is not one of a model; a wrong one must not keep us busy.
LARGEST_HEADER, MOST_ENTRIES, MOST_DIMENSIONS = 32 * 2**20, 2**16, 4
CUT = f"its header is cut short, or longer than {LARGEST_HEADER} bytes"

Value = int | float | str | list[int | float | str] | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the header has it: its dimensions from the innermost, `offset` in the data."""

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    file: Path
    size: int  # of the whole file
    metadata: dict[str, Value]
    entries: list[Entry]
    data: int  # where tensors begin
    alignment: int


@dataclass(slots=True)
class _Cursor:
    """Reads a header front to back; what would lie past its end is a fault."""

    data: bytes
    at: int = 0

    def skip(self, count: int) -> int:
        """Where the next `count` bytes begin."""
        at, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise ValueError(CUT)
        return at

    def numbers(self, code: str, count: int = 1) -> tuple[int, ...]:
        at = self.skip(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self.data, at)

    def number(self, code: str) -> int:
        return self.numbers(code)[0]

    def text(self) -> str:
        at = self.skip(self.number("Q"))
        return self.data[at : self.at].decode()

    def value(self, *, kept: bool) -> Value:
        """A value behind its type; arrays that are not `kept` are passed over."""
        kind = self.number("I")
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}, which GGUF does not have")
        kind, count = self.number("I"), self.number("Q")
        if kind not in SCALARS and kind != STRING:
            raise ValueError(f"an array of type {kind}, which is not supported")
        if kept:
            _check_count(count, "values in a list")
            return (
                [self.text() for _ in range(count)]
                if kind == STRING
                else list(self.numbers(SCALARS[kind], count))
            )
        if kind == STRING:
            self._skip_texts(count)
        else:
            self.skip(count * struct.calcsize(f"<{SCALARS[kind]}"))
        return None

    def _skip_texts(self, count: int) -> None:
        """Vocabularies are long: no call and no object for each of their entries."""
        length, data = struct.Struct("<Q").unpack_from, self.data
        at, last = self.at, len(data) - 8
        for _ in range(count):
            if at > last:
                raise ValueError(CUT)
            at += 8 + length(data, at)[0]
        self.skip(at - self.at)

    def entry(self) -> Entry:
        name, count = self.text(), self.number("I")
        if count > MOST_DIMENSIONS:
            raise ValueError(f"{name} has {count} dimensions")
        dims = self.numbers("Q", count)
        return Entry(name, dims, self.number("I"), self.number("Q"))


def _check_count(count: int, what: str) -> None:
    if count > MOST_ENTRIES:
        raise ValueError(f"{count} {what}; more than {MOST_ENTRIES} are not believed")


def read_header(file: Path, *, kept: tuple[str, ...]) -> Header:
    """The header of `file`, with the arrays of these keys."""
    try:
        # Opening what is not a plain file may wait for ever.
        if not file.is_file():
            raise ValueError("a folder or a device" if file.exists() else "no such file")
        with open(file, "rb") as opened:
            return _parse(file, opened.read(LARGEST_HEADER), file.stat().st_size, kept)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not a whole GGUF file: {error}") from error


def _parse(file: Path, data: bytes, size: int, kept: tuple[str, ...]) -> Header:
    if data[:4] != b"GGUF":
        raise ValueError(f"it begins with {data[:4]!r}" if data else "it is empty")
    cursor = _Cursor(data, 4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version:#x}; expected 2 or 3, little-endian")
    tensors, keys = cursor.numbers("Q", 2)
    _check_count(tensors, "tensors")
    _check_count(keys, "keys")
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"key {key} occurs twice")
        metadata[key] = cursor.value(kept=key in kept)
    entries = [cursor.entry() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}; expected a power of two")
    start = -(-cursor.at // alignment) * alignment
    return Header(file, size, metadata, entries, start, alignment)
