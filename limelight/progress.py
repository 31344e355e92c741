"""Signs of life during a start: a bar on a terminal, plain lines elsewhere, and a hook for both."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

# Called with the phase's name and how much of it is done, 0 to 1.
Listener = Callable[[str, float], None]
SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Runs phases one after the other, showing each and telling `listener` of it."""

    def __init__(self, listener: Listener | None = None, *, quiet: bool = False):
        self.listener = listener or (lambda phase, share: None)
        self.quiet = quiet

    @contextmanager
    def phase(self, name: str, total: int, *, unit: str = "") -> Iterator[Callable[[int], None]]:
        """Yields `advance(amount)`; the phase is over when the block ends without an error."""
        started = time.monotonic()
        self.listener(name, 0.0)
        show = self._bar if sys.stderr.isatty() and not self.quiet else self._lines
        with show(name, total, unit) as advance:
            yield advance
        self.listener(name, 1.0)
        if not self.quiet:
            logger.info("%s: done in %.1f s", name, time.monotonic() - started)

    @contextmanager
    def _bar(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
        )
        with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
            task = bars.add_task(name, total=total)
            done = 0

            def advance(amount: int) -> None:
                nonlocal done
                done += amount
                bars.update(task, completed=done)
                self.listener(name, done / max(total, 1))

            yield advance

    @contextmanager
    def _lines(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        done, shown = 0, time.monotonic()

        def advance(amount: int) -> None:
            nonlocal done, shown
            done += amount
            self.listener(name, done / max(total, 1))
            if not self.quiet and time.monotonic() - shown > SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                logger.info("%s: %d of %d %s", name, done, total, unit)

        yield advance
