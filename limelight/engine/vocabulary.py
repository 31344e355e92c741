"""What the engine must know of a model's tokens: which end an answer, and which bytes they are."""

from typing import TYPE_CHECKING

from limelight.checkpoint import locate, read_json
from limelight.config import EngineConfig
from limelight.engine.grammar_worker import Vocabulary
from limelight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from limelight.engine.startup import Resolved


def stop_tokens(found: "Resolved") -> list[int]:
    """The end-of-sequence ids of generation_config.json, else of config.json."""
    vocab_size = found.shape.vocab_size
    beside = [found.weights] if found.weights.is_dir() else []
    files = [folder / "generation_config.json" for folder in (*beside, found.config)]
    for file in (*files, found.config / "config.json"):
        ids = read_json(file).get("eos_token_id") if file.exists() else None
        ids = [ids] if isinstance(ids, int) else ids
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(
            isinstance(item, int) and 0 <= item < vocab_size for item in ids
        ):
            raise ValueError(f"{file}: eos_token_id must be token ids below {vocab_size}: {ids!r}")
        return ids
    return []


def vocabulary(config: EngineConfig, found: "Resolved", ends: list[int]) -> Vocabulary:
    """The tokens as xgrammar takes them; `ValueError` for a model without a tokenizer."""
    source = config.text_source
    folder = found.weights if source == config.model else locate(source, weights=False)
    tokenizer = Tokenizer.load(folder)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, found.shape.vocab_size, ends)
