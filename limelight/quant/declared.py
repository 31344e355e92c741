"""What config.json (or ModelOpt's hf_quant_config.json) says of a checkpoint's four-bit weights.

Where weights are read, their own headers decide; this is for a model without them, and refuses
what cannot be read before anything is.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from limelight.checkpoint import read_json
from limelight.ops.fp4 import BLOCK

ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
COMPRESSED = "nvfp4-pack-quantized"


@dataclass(frozen=True, slots=True)
class Declared:
    """Whether linear layers are NVFP4, and the patterns of those that are not."""

    quantized: bool
    ignored: tuple[str, ...] = ()

    def packed(self, name: str) -> bool:
        """Whether the weight of that name is NVFP4; all experts of a kind have one name."""
        module = name.removesuffix(".weight")
        # A pattern may name the experts one by one.
        single = re.sub(r"\.experts\.(?=[a-z])", ".experts.0.", module)
        return self.quantized and not any(
            _matches(pattern, one) for pattern in self.ignored for one in {module, single}
        )


def _matches(pattern: str, module: str) -> bool:
    """`re:` begins a regular expression; else `*` is anything, and a module names what it holds."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def read_declared(folder: Path) -> Declared:
    """What the folder's files say; `ValueError` for a quantization that is not supported."""
    source = folder / "config.json"
    found = read_json(source).get("quantization_config")
    if found is None and (folder / "hf_quant_config.json").exists():
        source = folder / "hf_quant_config.json"
        found = read_json(source).get("quantization")
    if found is None:
        return Declared(False)
    if not isinstance(found, dict):
        raise ValueError(f"{source}: quantization_config must be an object")
    # ModelOpt's own file nests what config.json has flat.
    nested = found.get("quantization")
    found = nested if isinstance(nested, dict) else found
    if found.get("format") == COMPRESSED:
        return Declared(True, _patterns(found.get("ignore"), source))
    algorithm = found.get("quant_algo")
    if algorithm is None and found.get("quant_method", "modelopt") == "modelopt":
        # Of the KV cache alone.
        return Declared(False)
    if algorithm not in ALGORITHMS:
        method = found.get("format") or algorithm or found.get("quant_method")
        raise ValueError(
            f"{source}: quantized as {method!r}, which is not supported; "
            f"supported are {', '.join(ALGORITHMS)} and {COMPRESSED}"
        )
    if found.get("group_size", BLOCK) != BLOCK:
        raise ValueError(f"{source}: group_size {found['group_size']}; NVFP4 has {BLOCK}")
    ignored = found.get("ignore", found.get("exclude_modules"))
    return Declared(True, _patterns(ignored, source))


def _patterns(value: object, source: Path) -> tuple[str, ...]:
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{source}: the list of what is not quantized must hold names")
    for pattern in value:
        if pattern.startswith("re:"):
            if re.search(r"\)[*+?{]", pattern):
                raise ValueError(f"{source}: {pattern}: a repeated group can take for ever")
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{source}: {pattern}: {error}") from error
    return tuple(value)
