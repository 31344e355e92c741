"""How long new weights and sleep take in a running server, and whether it then says what it should.

    python benchmarks/weight_sync.py benchmarks/configs/flint --json FILE

starts `limelight serve` with dummy weights on one GPU and is its trainer: it sends tensors of the
model's own shapes, filled with random numbers, through CUDA's inter-process memory, one buffer at
a time. With `--backend nccl` it holds all of them on a GPU of its own (two are needed); with
`--backend gloo --device cpu` a bundled model does, without a GPU.

Checked on the way: greedy answers after a sleep and after a wake are the same; after new weights
nothing of the old ones is found in the prefix cache, answers differ, and do not depend on graphs
that were captured before; the server's own checksums say that all weights have changed.
"""

import argparse
import base64
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch

from limelight.bench import record
from limelight.checkpoint import locate
from limelight.models.layers import Placement
from limelight.models.loader import build, read_config
from limelight.parallel.mesh import Mesh
from limelight.rl.sender import WeightSender

BUFFER_BYTES = 2**30
SECONDS_TO_START = 900
TOKENS = 32
PROMPTS = 8
BEGAN = time.perf_counter()


class Server:
    """A served model, and what is asked of it."""

    def __init__(self, model: str, backend: str, device: str, flags: list[str]):
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        transfer = ["--enable-rl", "--weight-transfer-config", json.dumps({"backend": backend})]
        if backend == "ipc":
            transfer.append("--enable-pickled-ipc-handles")
        command = [sys.executable, "-m", "limelight", "serve", model, "--port", "0", *transfer]
        # Over NCCL the trainer has the first GPU, and the server the second.
        shown = {"CUDA_VISIBLE_DEVICES": "1"} if backend == "nccl" else {}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--device", device, *flags], stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | shown,
            )  # fmt: skip

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while not (found := re.search(r"http://[\d.]+:\d+", self.log.read_text())):
            self._check(deadline)
        self.url = found[0]
        while True:
            self._check(deadline)
            try:
                if self.ask("GET", "/ready")["ready"]:
                    return
            except OSError:
                continue

    def _check(self, deadline: float) -> None:
        if self.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{self.log.read_text()[-3000:]}")
        time.sleep(0.2)

    def ask(self, method: str, path: str, body: object = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def answers(self, vocab: int, *, salt: str) -> tuple[list[list[int]], int]:
        """Greedy answers to fixed prompts, one after the other, and how many tokens were cached."""
        tokens, cached = [], 0
        for i in range(PROMPTS):
            generator = torch.Generator().manual_seed(i)
            ids = torch.randint(vocab, (100 + 13 * i,), generator=generator).tolist()
            sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
            body = {"token_ids": ids, "sampling_params": sampling, "cache_salt": salt}
            told = self.ask("POST", "/inference/v1/generate", body)
            tokens.append(told["choices"][0]["token_ids"])
            cached += told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens, cached


class Weights:
    """The tensors of a model as transformers names them, filled anew for each seed."""

    def __init__(self, model: str):
        architecture, self.config = read_config(locate(model, weights=False))
        place = Placement(Mesh.single(), torch.bfloat16, torch.device("cpu"), outline=True)
        outline = build(architecture, self.config, place)
        back = {new: old for old, new in outline.renames.items()}
        self.kinds: list[tuple[str, torch.dtype, tuple[int, ...], float, float]] = []
        for name, target in outline.targets.items():
            shape = target.shape
            if name.endswith("experts.up_proj.weight"):
                continue
            if name.endswith("experts.gate_proj.weight"):
                name = name.replace("gate_proj.weight", "gate_up_proj")
                shape = (shape[0], 2 * shape[1], shape[2])
            elif name.endswith("experts.down_proj.weight"):
                name = name.removesuffix(".weight")
            for new, old in back.items():
                name = name.replace(new, old)
            dummy = target.dummy
            self.kinds.append((name, target.into.dtype, shape, dummy.mean, dummy.std or 0.02))

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() * kind.itemsize for _, kind, shape, _, _ in self.kinds)

    def filled(self, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator(device=device).manual_seed(seed)
        for name, kind, shape, mean, std in self.kinds:
            value = torch.empty(shape, dtype=kind, device=device)
            yield name, value.normal_(mean, std, generator=generator)


class IPCSender:
    """Puts tensors into one buffer, as many as fit, and lets the server read them from there."""

    def __init__(self, server: Server):
        self.server, self.seconds = server, 0.0
        self.uuid = str(torch.cuda.get_device_properties(0).uuid)
        server.ask("POST", "/init_weight_transfer_engine", {"init_info": {"packed": True}})

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """`seconds` grows by what the server takes; the rest is spent on random numbers."""
        self._order("/start_weight_update", {})
        piece: list[tuple[str, torch.Tensor]] = []
        for name, value in tensors:
            if piece and sum(x.nbytes for _, x in piece) + value.nbytes > BUFFER_BYTES:
                self._send(piece)
                piece = []
            piece.append((name, value))
        self._send(piece)
        self._order("/finish_weight_update", {"weight_version": "new"})

    def _send(self, piece: list[tuple[str, torch.Tensor]]) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.cat([x.view(-1).view(torch.uint8) for _, x in piece])
        torch.cuda.synchronize()
        handles = {self.uuid: reduce_tensor(buffer)[1]}
        info = {
            "names": [name for name, _ in piece],
            "dtype_names": [str(x.dtype).removeprefix("torch.") for _, x in piece],
            "shapes": [list(x.shape) for _, x in piece],
            "tensor_sizes": [x.nbytes for _, x in piece],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }
        self._order("/update_weights", {"update_info": info})
        del buffer

    def _order(self, path: str, body: object) -> None:
        began = time.perf_counter()
        self.server.ask("POST", path, body)
        self.seconds += time.perf_counter() - began


def sync(server: Server, weights: Weights, backend: str, seed: int) -> float:
    """Send all weights; the seconds that the transfer took."""
    if backend == "ipc":
        sender = IPCSender(server)
        sender.send(weights.filled(seed, torch.device("cuda", 0)))
        return sender.seconds
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    tensors = dict(weights.filled(seed, device))
    with WeightSender(server.url, backend=backend, device=device) as sender:
        began = time.perf_counter()
        sender.send(tensors.items(), version="new")
        return time.perf_counter() - began


def used(device: int | None) -> int:
    """Bytes of a GPU that are in use."""
    if device is None:
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:.0f} s: {text}", flush=True)


def expect(condition: object, text: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {text}")
    say(text)


def measure(server: Server, weights: Weights, args: argparse.Namespace) -> dict[str, object]:
    vocab, gpu = weights.config.vocab_size, args.server_gpu
    row: dict[str, object] = {"model": args.model, "backend": args.backend, "bytes": weights.nbytes}
    idle = args.idle_bytes
    say("the server is ready")
    before, _ = server.answers(vocab, salt="a")
    awake = used(gpu)
    began = time.perf_counter()
    server.ask("POST", "/sleep?level=1")
    row["sleep_s"] = round(time.perf_counter() - began, 2)
    say(f"asleep, after {row['sleep_s']} s")
    asleep = used(gpu)
    began = time.perf_counter()
    server.ask("POST", "/wake_up?tags=weights")
    server.ask("POST", "/wake_up?tags=kv_cache")
    row["wake_s"] = round(time.perf_counter() - began, 2)
    say(f"awake, after {row['wake_s']} s")
    if gpu is not None:
        row["freed_share"] = freed = round((awake - asleep) / (awake - idle), 4)
        expect(freed > 0.95, f"sleep gives {100 * freed:.1f} % of the server's device memory back")
    expect(server.answers(vocab, salt="b")[0] == before, "answers after a sleep are the same")
    told = server.ask("POST", "/weight_checker", {"action": "checksum"})
    seconds = [sync(server, weights, args.backend, 1)]
    say(f"all weights sent, in {seconds[0]:.2f} s")
    answers, cached = server.answers(vocab, salt="a")
    expect(cached == 0, "nothing of the old weights is found in the prefix cache")
    expect(answers != before, "answers are those of other weights")
    told |= {"action": "compare", "baseline": told["tensors"]}
    changed = server.ask("POST", "/weight_checker", told)["different"]
    expect(len(changed) == len(told["tensors"]), "all weights have changed")
    server.ask("POST", "/sleep?level=1")
    server.ask("POST", "/wake_up")
    again, _ = server.answers(vocab, salt="c")
    expect(again == answers, "graphs captured before and after the update say the same")
    seconds += [sync(server, weights, args.backend, 2 + i) for i in range(args.rounds - 1)]
    row["sync_s"] = record.spread(seconds)
    row["gb_per_s"] = record.spread([weights.nbytes / 1e9 / s for s in seconds])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="flint-nano")
    parser.add_argument("--backend", choices=("ipc", "nccl", "gloo"), default="ipc")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    args.server_gpu = None
    if args.device == "cuda":
        args.server_gpu = 1 if args.backend == "nccl" else 0
        torch.cuda.init()
    args.idle_bytes = used(args.server_gpu)
    if Path(args.model).is_dir():
        flags += ["--load-format", "dummy"]
    server = Server(args.model, args.backend, args.device, flags)
    try:
        server.wait_ready()
        row = measure(server, Weights(args.model), args)
    except BaseException:
        print(server.log.read_text()[-2000:], flush=True)
        raise
    finally:
        server.process.terminate()
        server.process.wait()
    print(json.dumps(row))
    if args.json is not None:
        command = shlex.join(["python", *sys.argv])
        told = record.record("weight_sync", [], [row]) | {"command": command}
        record.save(args.json, told)


if __name__ == "__main__":
    main()
