"""Texts that end where a mark begins, so that no mark may be a part of them."""

from collections.abc import Iterable
from dataclasses import dataclass

from limelight.text.formats import Format, either, free_text, literal, pattern, sequence
from limelight.text.regex import ALL, BLANKS, class_of, subtracted
from limelight.text.spelling import Untold, but, escaped

COUNTED = 24  # characters of texts that are counted exactly, bytes of no character included
# What Python takes from the ends of a text that is stripped, and a little more.
STRIPPED = [*BLANKS, (0x1C, 0x1F), (0x85, 0x85)]


@dataclass(frozen=True, slots=True)
class Fence:
    """The marks that a text must not have in it; none of them is a part of another.

    `strips`: blanks at both ends of the text do not count.
    """

    marks: tuple[str, ...]
    strips: bool = False

    @classmethod
    def against(cls, marks: Iterable[str], *, strips: bool = False) -> "Fence":
        given = sorted(set(marks))
        others = [[other for other in given if other != mark] for mark in given]
        needed = [
            mark
            for mark, rest in zip(given, others, strict=True)
            if not any(other in mark for other in rest)
        ]
        return cls(tuple(needed), strips)

    @property
    def first(self) -> frozenset[str]:
        """What marks begin with: a text without it has no mark."""
        return frozenset(mark[0] for mark in self.marks)

    def check(self, ends: Iterable[str]):
        """Refuse ends of the text that with its last characters could make another mark."""
        for mark in self.marks:
            for end in ends:
                for at in range(1, len(mark)):
                    if end.startswith(mark[at:]) or mark.startswith(end, at):
                        raise Untold(f"{mark!r} may begin before {end!r} does")

    def lets(self, text: str) -> bool:
        return not any(mark in text for mark in self.marks)

    @property
    def cut(self) -> frozenset[str]:
        """As few characters as are easily found, one of which is in each of the marks."""
        found: list[str] = []
        left = list(self.marks)
        while left:
            characters = sorted({character for mark in left for character in mark})
            found.append(
                max(
                    characters,
                    key=lambda c: (
                        sum(c in mark for mark in left),
                        not c.isalnum(),
                        sum(mark.startswith(c) for mark in left),
                    ),
                )
            )
            left = [mark for mark in left if found[-1] not in mark]
        return frozenset(found)

    def text(self, low: int = 0, high: int | None = None, *, first_not: str = "") -> Format:
        """Any text without marks, of `low` to `high` characters, which `first_not` do not begin.

        Fewer texts fit than could: of the first `low` characters none begins a mark, and with a
        `high` texts have no character of `cut`, and long ones begin with no blank.
        """
        if high is not None and high < low:
            raise Untold(f"no text has {low} characters at least and {high} at most")
        if high is not None and high <= COUNTED:
            return pattern(self._counted(low, high, first_not)) if high else literal("")
        if low == 0 and high is None and not first_not:
            return free_text(self.marks)
        if low < 2 and high is None and not self.strips and not first_not:
            return sequence(pattern(self._first_piece()), free_text(self.marks))
        kept = subtracted(but(ALL, self.first), STRIPPED if self.strips else [])
        # Masks do not count in tokens that begin before the text: those are blanks, if long.
        first = subtracted(but(kept, first_not), BLANKS if high is not None else [])
        count = max(low, 1)
        # A bound beside marks of several characters would take many masks.
        rest = free_text(self.marks) if high is None else free_text(sorted(self.cut), high - count)
        made = sequence(pattern(f"{class_of(first)}{class_of(kept)}{{{count - 1}}}"), rest)
        return made if low else either([literal(""), made])

    def _counted(self, low: int, high: int, first_not: str) -> str:
        """A regex, which takes a mask for each character: more than a bound of free text would."""
        inner = but(ALL, self.cut)
        # A line's end before the next argument may be no part of the text.
        outer = subtracted(inner, STRIPPED if self.strips else [(10, 10)])
        first, rest = class_of(but(outer, first_not)), class_of(inner)
        if low == 0:
            first = first if self.strips else class_of(but(inner, first_not))
            return f"(?:{first}{rest}{{0,{high - 1}}})?"
        if high == 1:
            return first
        if low == 1:
            return f"{first}(?:{rest}{{0,{high - 2}}}{class_of(outer)})?"
        return f"{first}{rest}{{{low - 2},{high - 2}}}{class_of(outer)}"

    def _first_piece(self) -> str:
        """A regex for beginnings of texts that have left every beginning of a mark behind.

        Only the first character of marks is followed: each one more would take a mask of its own.
        """
        begun = sorted({mark[0] for mark in self.marks if len(mark) > 1})
        branches = [class_of(but(ALL, self.first))]
        for first in begun:
            second = {mark[1] for mark in self.marks if mark.startswith(first)}
            branches.append(escaped(first) + class_of(but(ALL, self.first | second)))
        return f"(?:{'|'.join(branches)})"
