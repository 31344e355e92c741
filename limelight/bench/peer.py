"""The model as `transformers` runs it, timed as the engine is: for comparisons in one run."""

import time

from limelight.bench.decode import DROPPED_STEPS, Decoded
from limelight.checkpoint import locate
from limelight.config import EngineConfig


class Transformers:
    """The checkpoint of `config`, loaded by `transformers` in `dtype`, with its own KV cache."""

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
        self.config = model.config
        self.model: torch.nn.Module = torch.nn.Module.to(model, self.device).eval()

    def time_decode(self, prompts: list[list[int]], *, num_steps: int) -> Decoded:
        """Time `num_steps` greedy steps of all `prompts`, which are equally long, as one batch."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        tokens = torch.tensor(prompts, device=self.device)
        seconds, steps = [], []
        with torch.inference_mode():
            for _ in range(1 + DROPPED_STEPS + num_steps):
                start = time.perf_counter()
                # By position: the cache's name differs between versions.
                out = self.model(tokens, None, None, cache, use_cache=True, logits_to_keep=1)
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)
                # Reading the tokens waits for the device, as a server must in each step.
                steps.append(tokens[:, 0].tolist())
                seconds.append(time.perf_counter() - start)
        token_ids = [list(sequence) for sequence in zip(*steps, strict=True)]
        # The first was the prefill.
        return Decoded(seconds[1 + DROPPED_STEPS :], token_ids)
