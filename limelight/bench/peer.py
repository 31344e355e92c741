"""`generate` of `transformers`, timed from token to token: for comparisons in one run."""

import time
from itertools import pairwise

from limelight.bench.decode import DROPPED_STEPS, Decoded
from limelight.checkpoint import locate
from limelight.config import EngineConfig


class Stamps:
    """A streamer that notes when `generate` gives out the prompts, and then each step's tokens."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, tokens: object):
        self.times.append(time.perf_counter())

    def end(self):
        """Nothing is held back."""


class Transformers:
    """The checkpoint of `config`, loaded by `transformers` in `dtype`."""

    def __init__(self, config: EngineConfig, *, dtype: str):
        import torch

        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise ValueError("--compare transformers needs the package transformers") from error
        folder = locate(config.model, revision=config.revision)
        on_gpu = config.device != "cpu" and torch.cuda.is_available()
        self.device = "cuda" if on_gpu else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        torch.nn.Module.to(model, self.device).eval()
        # An answer is as long as asked for, as the engine's is.
        model.generation_config.eos_token_id = None
        self.generate = model.generate

    def time_decode(self, prompts: list[list[int]], *, num_steps: int) -> Decoded:
        """Time `num_steps` greedy steps of all `prompts`, which are equally long, as one batch."""
        import torch

        prompts_BT = torch.tensor(prompts, device=self.device)
        stamps = Stamps()
        made_BT = self.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            do_sample=False,
            max_new_tokens=1 + DROPPED_STEPS + num_steps,
            streamer=stamps,
        )
        seconds = [after - before for before, after in pairwise(stamps.times)]
        # The first is the prefill's.
        return Decoded(seconds[1 + DROPPED_STEPS :], made_BT[:, prompts_BT.shape[1] :].tolist())
