"""Answers of a served model to sums, with all that a trainer needs of them."""

import base64
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

SECONDS_TO_START = 900
AT_ONCE = 64  # requests


@dataclass(frozen=True, slots=True)
class Question:
    """A sum, the ids of its prompt, and what is right."""

    token_ids: list[int]
    right: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """An answer; `routed` [prompt + answer - 1, layers, chosen] has the experts of its tokens."""

    question: Question
    token_ids: list[int]
    logprobs: list[float]
    routed: np.ndarray
    truncated: bool
    reward: float


class Sums:
    """Sums of two numbers of three digits; the same few are kept for scoring alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, seed: int, num_held_out: int):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        fixed = random.Random("held out")
        self.scored = [_pair(fixed) for _ in range(num_held_out)]
        self.held_out = [self._question(*pair) for pair in self.scored]

    def draw(self, count: int) -> list[Question]:
        """Questions to train on."""
        found: list[Question] = []
        while len(found) < count:
            if (pair := _pair(self.rng)) not in self.scored:
                found.append(self._question(*pair))
        return found

    def is_right(self, question: Question, token_ids: list[int]) -> bool:
        """Whether the last number of the answer is the sum."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return re.findall(r"\d+", text)[-1:] == [question.right]

    def _question(self, a: int, b: int) -> Question:
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} + {b}?"}],
            add_generation_prompt=True, enable_thinking=False, return_dict=False,
        )  # fmt: skip
        return Question(list(ids), str(a + b))


def _pair(rng: random.Random) -> tuple[int, int]:
    return rng.randint(100, 999), rng.randint(100, 999)


class Server:
    """A served model: one that is there at `url`, or `limelight serve` until the block ends."""

    def __init__(self, url: str | None, model: str, *, device: str, dtype: str, flags: list[str]):
        self.process = None
        if url is not None:
            self.url = url.rstrip("/")
            return
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        backend = "gloo" if device == "cpu" else "nccl"
        command = [
            sys.executable, "-m", "limelight", "serve", model, "--port", "0",
            "--device", device, "--dtype", dtype, "--enable-rl",
            "--weight-transfer-config", json.dumps({"backend": backend}),
            "--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs",
            # Drafters are not updated.
            "--speculative-config", '{"num_speculative_tokens": 0}', *flags,
        ]  # fmt: skip
        # The trainer has the first GPU, and the server the second.
        shown = {} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": "1"}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | shown
            )

    def __enter__(self) -> "Server":
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while self.process is not None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")
            if found := re.search(r"http://[\d.]+:\d+", self.log.read_text()):
                self.url = found[0]
                try:
                    urllib.request.urlopen(self.url + "/ready", timeout=60).close()
                    return
                except OSError:
                    pass
            time.sleep(0.2)

    def ask(self, path: str, body: object) -> dict:
        """The answer to a POST; `RuntimeError` with what the server says against it."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode(errors='replace')[:500]}") from error

    def generate(self, questions: list[Question], **sampling: object) -> list[list[dict]]:
        """The choices of each question; with a `seed` each has its own."""
        seed, n = sampling.pop("seed", None), sampling.get("n", 1)

        def one(i: int) -> list[dict]:
            own = {} if seed is None else {"seed": seed + i * n}
            params = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0} | sampling | own
            body = {"token_ids": questions[i].token_ids, "sampling_params": params}
            return self.ask("/skyrl/v1/generate", body)["choices"]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, range(len(questions))))


def rollout(question: Question, choice: dict, reward: float) -> Rollout:
    """What a choice of the server says; `RuntimeError` if it does not say all that is needed."""
    told = choice["routed_experts"]
    if told is None:
        raise RuntimeError("no routed experts: start the server --enable-return-routed-experts")
    data = base64.b64decode(told["data"])
    routed = np.frombuffer(data, dtype=told["dtype"]).reshape(told["shape"])
    rows = len(question.token_ids) + len(choice["token_ids"]) - 1
    if len(routed) != rows:
        raise RuntimeError(f"{len(routed)} rows of experts, and {rows} tokens that have some")
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    truncated = choice["finish_reason"] == "length"
    return Rollout(question, choice["token_ids"], logprobs, routed, truncated, reward)
