"""Limelight: an inference engine and server for the Flint and Beam model families."""

from typing import TYPE_CHECKING

from limelight.types import LoRARequest, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from limelight.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> type:
    """Bring `LLM`, and torch with it, only when it is asked for."""
    if name == "LLM":
        from limelight.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'limelight' has no attribute {name!r}")
