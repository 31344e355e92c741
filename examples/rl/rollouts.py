"""Answers of a served model to sums, with all that a trainer needs of them."""

import base64
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

AT_ONCE = 64  # requests


@dataclass(frozen=True, slots=True)
class Question:
    """The ids of a prompt, what is right, and what is asked."""

    token_ids: list[int]
    right: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`routed` [prompt + answer - 1, layers, chosen] has the experts of all tokens but the last."""

    token_ids: list[int]
    logprobs: list[float]
    routed: np.ndarray | None
    truncated: bool


class Sums:
    """Sums of two numbers of three digits; the same few are held out, to score with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, num_held_out: int):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        fixed = random.Random("held out")
        pairs = [_pair(fixed) for _ in range(num_held_out)]
        self.held_out, self.held_out_pairs = [self._question(*pair) for pair in pairs], set(pairs)

    def draw(self, count: int) -> list[Question]:
        """Questions to train on."""
        pairs: list[tuple[int, int]] = []
        while len(pairs) < count:
            pairs += {_pair(self.rng)} - self.held_out_pairs
        return [self._question(*pair) for pair in pairs]

    def is_right(self, question: Question, answer: Answer) -> bool:
        """Whether the answer has ended, and its last number is the sum."""
        text = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return not answer.truncated and re.findall(r"\d+", text)[-1:] == [question.right]

    def _question(self, a: int, b: int) -> Question:
        text = f"What is {a} + {b}?"
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True, enable_thinking=False, return_dict=False,
        )  # fmt: skip
        return Question(list(ids), str(a + b), text)


def _pair(rng: random.Random) -> tuple[int, int]:
    return rng.randint(100, 999), rng.randint(100, 999)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(model: str, *, device: str, dtype: str, log: Path, flags: list[str]) -> Iterator[str]:
    """The address of a server that a trainer may come to; it ends with the block."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        sys.executable, "-m", "limelight", "serve", model, "--port", str(port),
        "--device", device, "--dtype", dtype, "--enable-rl",
        "--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs",
        # Drafters are not updated.
        "--speculative-config", '{"num_speculative_tokens": 0}', *flags,
    ]  # fmt: skip
    # The trainer has the first GPU, and the server the second.
    shown = {} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | shown)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
            with suppress(OSError):
                urllib.request.urlopen(url + "/ready", timeout=60).close()
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def transfer_flags(device: str) -> list[str]:
    """By which a server takes weights from a trainer on such a device."""
    backend = "gloo" if device == "cpu" else "nccl"
    return ["--weight-transfer-config", json.dumps({"backend": backend})]


def generate(
    url: str, questions: list[Question], model: str | None = None, *, seed: int, **sampling
) -> list[list[Answer]]:
    """`n` answers to each question, each with a seed of its own, counted from `seed`; of an
    adapter, if `model` is its name."""
    given = {"n": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0} | sampling

    def ask(i: int) -> list[Answer]:
        params = given | {"seed": seed + i * given["n"]}
        body = {"token_ids": questions[i].token_ids, "sampling_params": params, "model": model}
        told = post(url, "/skyrl/v1/generate", body)
        return [_read(choice) for choice in told["choices"]]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, range(len(questions))))


def post(url: str, path: str, body: dict) -> dict:
    """The answer; `RuntimeError` with what the server says."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as told:
            return json.load(told)
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode(errors="replace")[:500]) from error


def _read(choice: dict) -> Answer:
    told = choice["routed_experts"]
    if told is None:
        raise RuntimeError("no routed experts: is the server --enable-return-routed-experts?")
    routed = np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Answer(choice["token_ids"], logprobs, routed, choice["finish_reason"] != "stop")
