"""What a config says of a checkpoint's quantized weights: config.json, ModelOpt's
hf_quant_config.json, or the user.

Where weights are read, their own headers decide; this is for a model without them, and for plain
weights that are to be quantized as they are loaded. It refuses what cannot be read before
anything is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from limelight.checkpoint import read_json
from limelight.ops import fp4, mxfp8
from limelight.quant.stored import Packing

ALGORITHMS: dict[object, Packing] = {"NVFP4": "NVFP4", "W4A16_NVFP4": "NVFP4", "MXFP8": "MXFP8"}
BLOCKS: dict[Packing, int] = {"NVFP4": fp4.BLOCK, "MXFP8": mxfp8.BLOCK}
COMPRESSED = "nvfp4-pack-quantized"
# How compressed-tensors says MXFP8, of weights and of activations.
FLOAT_8 = "float-quantized"
GROUP = {
    "num_bits": 8, "type": "float", "strategy": "group", "group_size": mxfp8.BLOCK,
    "symmetric": True, "scale_dtype": "uint8",
}  # fmt: skip
# What `--quantization mxfp8` leaves as it is.
KEPT = "lm_head"


@dataclass(frozen=True, slots=True)
class Declared:
    """How linear layers are quantized, if at all, and the patterns of those that are not."""

    format: Packing | None = None
    ignored: tuple[str, ...] = ()

    def packing(self, name: str) -> Packing | None:
        """How the weight of that name is; all experts of a kind have one name."""
        module = name.removesuffix(".weight")
        if self.format is None or self.format == "MXFP8" and module == KEPT:
            return None
        # A pattern may name the experts one by one.
        single = re.sub(r"\.experts\.(?=[a-z])", ".experts.0.", module)
        ignored = any(
            _matches(pattern, one) for pattern in self.ignored for one in {module, single}
        )
        return None if ignored else self.format


PLAIN = Declared()


def _matches(pattern: str, module: str) -> bool:
    """`re:` begins a regular expression; else `*` is anything. Either must match the whole name of
    the module, or of one that holds it: `mlp.gate` is not the beginning of `mlp.gate_proj`."""
    if not pattern.startswith("re:"):
        return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
    parts = module.split(".")
    holding = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return any(re.fullmatch(pattern[3:], one) for one in holding)


def read_declared(folder: Path) -> Declared:
    """What the folder's files say; `ValueError` for a quantization that is not supported."""
    source = folder / "config.json"
    found = read_json(source).get("quantization_config")
    if found is None and (folder / "hf_quant_config.json").exists():
        source = folder / "hf_quant_config.json"
        found = read_json(source).get("quantization")
    return PLAIN if found is None else declared_by(found, str(source))


def asked_for(
    quantization: str | None,
    quantization_config: Mapping[str, object] | None,
    hf_overrides: Mapping[str, object] | None,
) -> Declared | None:
    """What the user wants of plain weights, if anything; `ValueError` for what cannot be had."""
    for flag, given, known in (
        ("--quantization-config", quantization_config, "ignore"),
        ("--hf-overrides", hf_overrides, "quantization_config"),
    ):
        for key in given or ():
            if key != known:
                raise ValueError(f"{flag} has no key {key!r} here; it has {known}")
    if quantization_config is not None and quantization != "mxfp8":
        raise ValueError("--quantization-config needs --quantization mxfp8")
    found = (hf_overrides or {}).get("quantization_config")
    if found is not None:
        if quantization_config is not None:
            raise ValueError(
                "--hf-overrides says what is quantized: leave --quantization-config out"
            )
        return declared_by(found, "--hf-overrides")
    if quantization != "mxfp8":
        return None
    ignored = (quantization_config or {}).get("ignore")
    return Declared("MXFP8", _patterns(ignored, "--quantization-config"))


def declared_by(found: object, source: str) -> Declared:
    """What a `quantization_config` says."""
    if not isinstance(found, dict):
        raise ValueError(f"{source}: quantization_config must be an object")
    # ModelOpt's own file nests what config.json has flat.
    nested = found.get("quantization")
    found = nested if isinstance(nested, dict) else found
    if found.get("format") == COMPRESSED:
        return Declared("NVFP4", _patterns(found.get("ignore"), source))
    if found.get("format") == FLOAT_8:
        _check_groups(found.get("config_groups"), source)
        return Declared("MXFP8", _patterns(found.get("ignore"), source))
    algorithm = found.get("quant_algo")
    if algorithm is None and found.get("quant_method", "modelopt") == "modelopt":
        # Of the KV cache alone.
        return PLAIN
    if algorithm not in ALGORITHMS:
        method = found.get("format") or algorithm or found.get("quant_method")
        raise ValueError(
            f"{source}: quantized as {method!r}, which is not supported; supported are "
            f"{', '.join(map(str, ALGORITHMS))}, {COMPRESSED}, and {FLOAT_8} of MXFP8"
        )
    form = ALGORITHMS[algorithm]
    if found.get("group_size", BLOCKS[form]) != BLOCKS[form]:
        raise ValueError(f"{source}: group_size {found['group_size']}; {form} has {BLOCKS[form]}")
    ignored = found.get("ignore", found.get("exclude_modules"))
    return Declared(form, _patterns(ignored, source))


def _check_groups(groups: object, source: str) -> None:
    """Refuse 8-bit floats that are not MXFP8, weights and activations alike."""
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    if not isinstance(group, dict) or not isinstance(groups, dict) or len(groups) > 1:
        raise ValueError(f"{source}: config_groups must have one group")
    for what, dynamic in (("weights", False), ("input_activations", True)):
        found = group.get(what)
        given = found if isinstance(found, dict) else {}
        for key, value in (GROUP | {"dynamic": dynamic}).items():
            if str(given.get(key)).removeprefix("torch.") != str(value):
                raise ValueError(
                    f"{source}: {what} have {key} {given.get(key)!r}; of {FLOAT_8} only MXFP8 is "
                    f"supported, weights and activations in blocks of {mxfp8.BLOCK}: {value!r}"
                )


def _patterns(value: object, source: str) -> tuple[str, ...]:
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
