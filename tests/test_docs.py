"""What the pages for readers point at is there: files, headings, figures, commands, flags."""

import re
import shlex
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

from limelight.cli import COMMANDS
from limelight.config import EngineConfig, ServerConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "nano/README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FIGURES = re.compile(r"`((?:benchmarks/results/)?[\w*{},.-]+-[\w*{},.-]*[0-9a-f]{7}\.json)`")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link."""
    titles = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def names(text: str) -> list[str]:
    """A name with {a,b} in it as all that it stands for."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", text)]
    return ["".join(parts) for parts in product(*pieces)]


@pages
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_every_file_of_figures_is_there(page):
    for figures in FIGURES.findall(page.read_text(encoding="utf-8")):
        for name in names(figures.removeprefix("benchmarks/results/")):
            assert list((ROOT / "benchmarks/results").glob(name)), name


@pages
def test_every_command_is_one(page):
    """Lines that begin with the command: its name, and flags that it or its relatives know."""
    text = page.read_text(encoding="utf-8")
    configs = [item.name for one in (EngineConfig, ServerConfig) for item in fields(one)]
    known = {"--" + name.replace("_", "-") for name in configs}
    for line in re.findall(r"^ *limelight (.*)$", text.replace("\\\n", " "), re.MULTILINE):
        command, *words = shlex.split(line.partition(" [")[0])
        assert command in COMMANDS, line
        if command == "serve":
            flags = {word.partition("=")[0].partition(".")[0] for word in words}
            assert {flag for flag in flags if flag.startswith("--")} <= known, line
