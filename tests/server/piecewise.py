"""Answers whose calls are told as they are written, and so may be cut short."""

from server_fakes import FakeForm, FakeParser

from limelight.text.parsers import CallPiece, Said


class PiecewiseParser(FakeParser):
    """As `FakeParser`, but for its calls, each of which must have arguments."""

    def _take(self, character: str) -> Said:
        if self.where != "call":
            return super()._take(character)
        named = " " in self.call
        self.call += character
        if character == " " and not named:
            return Said(calls=[CallPiece(self.num_calls, self.call[:-1])])
        if character == "]":
            self.where = "content"
            self.num_calls += 1
            return Said(calls=[CallPiece(self.num_calls - 1, ends=True)])
        return Said(calls=[CallPiece(self.num_calls, None, character)]) if named else Said()


class PiecewiseForm(FakeForm):
    def parser(self, asked) -> PiecewiseParser:
        return PiecewiseParser(reads_calls=bool(asked.tools))
