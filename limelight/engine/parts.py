"""What an engine works with, as it sees it: a runner, grammars, other ranks and engines."""

from collections.abc import Iterable
from typing import Protocol

from limelight.steps import StepPlan, StepResult
from limelight.types import Request


class Launched(Protocol):
    """A step that may still run."""

    def result(self) -> StepResult: ...


class Runner(Protocol):
    """What starts a plan: `ModelRunner`, or a scripted one in tests."""

    def launch(self, plan: StepPlan) -> Launched: ...


class Decided(Protocol):
    """A request whose grammar is there, or why it has none."""

    @property
    def request(self) -> Request: ...

    @property
    def refused(self) -> str | None: ...

    @property
    def error(self) -> str | None: ...


class Grammars(Protocol):
    """What compiles constraints meanwhile: that of `engine/grammar.py`, or a scripted one."""

    def ask(self, request: Request) -> None: ...

    def decided(self, *, seconds: float) -> Iterable[Decided]: ...

    def forget(self, request_id: str) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


class Closing(Protocol):
    """What has an end: the other ranks."""

    def close(self) -> None: ...


class Joined(Closing, Protocol):
    """The other engines, where they share this one's experts: their steps are its own too."""

    @property
    def called(self) -> bool: ...

    @property
    def waker(self) -> int:
        """A file that can be read once one has called."""

    def drain(self) -> None: ...
