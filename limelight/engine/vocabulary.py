"""What constraints must know of a model's tokens: which bytes they are, and which end an answer."""

from typing import TYPE_CHECKING

from limelight.checkpoint import locate
from limelight.config import EngineConfig
from limelight.engine.grammar_worker import Vocabulary
from limelight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from limelight.engine.startup import Resolved


def vocabulary(config: EngineConfig, found: "Resolved", ends: list[int]) -> Vocabulary:
    """The tokens as xgrammar takes them; `ValueError` for a model without a tokenizer."""
    source = config.text_source
    folder = found.weights if source == config.model else locate(source, weights=False)
    tokenizer = Tokenizer.load(folder)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, found.shape.vocab_size, ends)
