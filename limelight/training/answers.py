"""The target's own answers to the lines of a data file, sampled by the engine and kept in a file.

The file grows by whole batches, so a run that was killed goes on behind the last of them. It is a
data file itself: lines with the answer given, of which another drafter can learn.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from limelight.config import EngineConfig
from limelight.progress import Progress
from limelight.training.lines import Line
from limelight.types import SamplingParams

AT_ONCE = 1024  # answers, between two writes


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt and its answer: `tokens`, of which the first `prompt_length` are not learned."""

    tokens: list[int]
    prompt_length: int
    task: str
    held_out: bool


@dataclass(frozen=True, slots=True)
class Question:
    """A line to be answered at a temperature."""

    line: Line
    temperature: float


def questions(lines: list[Line], temperatures: list[float]) -> list[Question]:
    """Each line at each temperature; those held out are asked for the likeliest answer alone."""
    return [
        Question(line, temperature)
        for line in lines
        for temperature in ([0.0] if line.held_out or line.answer is not None else temperatures)
    ]


def collect(
    asked: list[Question],
    file: Path | None,
    config: EngineConfig,
    *,
    max_tokens: int,
    seed: int,
    progress: Progress,
) -> list[Document]:
    """A document for each question, read from `file`, if any, or sampled and written to it.

    `ValueError` where the file has answers to other questions, or where answers fail.
    """
    done = [] if file is None else _read(file, asked)
    open_ = asked[len(done) :]
    if not open_:
        return done
    if all(question.line.answer is not None for question in open_):
        return done + _keep(file, open_, [question.line.answer or [] for question in open_])
    from limelight.engine.llm import LLM

    with LLM(**asdict(config)) as llm, progress.phase(
        "sampling answers", len(asked), unit="answers"
    ) as advance:  # fmt: skip
        advance(len(done))
        for batch in _batches(open_):
            sampled = [question for question in batch if question.line.answer is None]
            prompts: list[list[int]] = [question.line.prompt for question in sampled]
            params = [
                _params(question, max_tokens, seed, llm.info.max_model_len) for question in sampled
            ]
            answers = [output.outputs[0] for output in llm.generate(prompts, params)]
            if errors := [one.error for one in answers if one.error is not None]:
                raise ValueError(f"the target cannot answer: {errors[0]}")
            tokens = iter([one.token_ids for one in answers])
            done += _keep(file, batch, [question.line.answer or next(tokens) for question in batch])
            advance(len(batch))
    return done


def _batches(asked: Iterable[Question]) -> Iterable[list[Question]]:
    rest = iter(asked)
    while batch := list(islice(rest, AT_ONCE)):
        yield batch


def _params(question: Question, max_tokens: int, seed: int, longest: int) -> SamplingParams:
    room = longest - len(question.line.prompt)
    return SamplingParams(
        temperature=question.temperature,
        max_tokens=min(max_tokens, room),
        seed=(seed * 1_000_003 + question.line.number) % 2**63,
    )


def _document(question: Question, answer: list[int]) -> Document:
    line = question.line
    return Document(line.prompt + answer, len(line.prompt), line.task, line.held_out)


def _keep(file: Path | None, batch: list[Question], answers: list[list[int]]) -> list[Document]:
    if file is not None:
        _write(file, batch, answers)
    return [_document(*pair) for pair in zip(batch, answers, strict=True)]


def _write(file: Path, batch: list[Question], answers: list[list[int]]) -> None:
    with file.open("a", encoding="utf-8") as out:
        for question, answer in zip(batch, answers, strict=True):
            line = question.line
            value: dict[str, object] = {"prompt": line.prompt, "answer": answer, "task": line.task}
            value["held_out"] = line.held_out
            out.write(json.dumps(value, separators=(",", ":")) + "\n")
        out.flush()
        os.fsync(out.fileno())


def _read(file: Path, asked: list[Question]) -> list[Document]:
    """The answers that a run before this one has left, without a last line that was cut short."""
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(file, whole)
    documents = []
    rows = data[:whole].splitlines()
    if len(rows) > len(asked):
        raise ValueError(f"{file}: more answers than there are questions; remove it")
    for question, row in zip(asked, rows, strict=False):
        value = json.loads(row)
        if value["prompt"] != question.line.prompt:
            raise ValueError(f"{file}: answers to another data file; remove it")
        documents.append(_document(question, value["answer"]))
    return documents
