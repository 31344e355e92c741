"""How many tokens each expert got: counted on the device, told and written to a file now and then.

The file is one JSON object, from which `--expert-placement` spreads experts over ranks:

    {"experts": 256, "layers": {"3": [tokens of expert 0, of expert 1, ...], ...}}
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from limelight.config import EngineConfig
from limelight.parallel.seat import Seat

logger = logging.getLogger(__name__)
# Reading the counts waits for the device.
SECONDS_BETWEEN_LOOKS = 10.0
SECONDS_BETWEEN_LOOKS_AT_REST = 1.0


class ExpertLoad:
    """The tokens of one engine's requests, by layer and expert."""

    def __init__(self, file: Path, read: Callable[[], dict[int, list[int]]]):
        self.file, self.read = file, read
        self.by_expert: list[int] = []  # of all layers together
        self.looked, self.steps = time.monotonic(), 0

    def look(self, steps: int, *, idle: bool) -> list[int]:
        """The tokens of each expert, as of now if it is time, after so many steps."""
        pause = SECONDS_BETWEEN_LOOKS_AT_REST if idle else SECONDS_BETWEEN_LOOKS
        if steps != self.steps and time.monotonic() - self.looked >= pause:
            self.steps, self.looked = steps, time.monotonic()
            try:
                self.write()
            except OSError as error:
                # A full disk is no reason to end requests.
                logger.error("--expert-load-file: %s", error)
        return self.by_expert

    def write(self) -> None:
        """Put the file in place, as a whole. `OSError` if that cannot be."""
        layers = self.read()
        self.by_expert = [sum(counts) for counts in zip(*layers.values(), strict=True)]
        record = {"experts": len(self.by_expert), "layers": layers}
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps(record) + "\n")
        part.replace(self.file)


def load_file(config: EngineConfig, seat: Seat) -> Path | None:
    """Where an engine writes its load: each of several has a file of its own, load.0.json and so
    on. `ValueError` if it cannot."""
    if config.expert_load_file is None:
        return None
    file = Path(config.expert_load_file)
    if seat.data_size > 1:
        file = file.with_name(f"{file.stem}.{seat.data_rank}{file.suffix}")
    if not file.parent.is_dir():
        raise ValueError(f"--expert-load-file: there is no folder {file.parent}")
    return file
