"""Where a model's files are: bundled name, local folder or hub id -> a folder, and its JSON."""

import json
from pathlib import Path
from typing import NoReturn

BUNDLED = Path(__file__).parent / "nano"
# The bundled models, and the parser that reads their answers.
BUNDLED_PARSERS = {
    "flint-nano": "glm47", "beam-nano": "beam", "flint-nano-nvfp4": "glm47",
    "beam-nano-nvfp4": "beam",
}  # fmt: skip
BUNDLED_NAMES = tuple(BUNDLED_PARSERS)
# A drafter of each; those in four bits have the drafter of the model that they were made of.
BUNDLED_DRAFTERS = {"flint-nano": "flint-nano-dflash2", "beam-nano": "beam-nano-dflash2"}
BUNDLED_DRAFTERS |= {f"{name}-nvfp4": drafter for name, drafter in BUNDLED_DRAFTERS.items()}
# What a checkpoint may consist of; pickles (.bin, .pt) run code when they are read.
HUB_FILES, HUB_WEIGHTS = ["*.json", "*.jinja"], ("*.safetensors", "*.gguf")
LARGEST_JSON = 64 * 2**20


def locate(model: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder with the files of `model`, or its .gguf file; a hub id is downloaded, or found in
    the hub's cache.

    Raises `ValueError` when there is no such model. `weights=False` leaves the weights out.
    """
    if model in BUNDLED_NAMES or model in BUNDLED_DRAFTERS.values():
        return BUNDLED / model
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise ValueError(
            f"{model} is a file; give the folder that holds config.json and weights, or a .gguf"
        )
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        _no_such_model(model)
    return _from_hub(model, revision, weights)


def _no_such_model(model: str) -> NoReturn:
    raise ValueError(
        f"no model {model!r}: not a folder, not a hub id (owner/name), "
        f"not bundled ({', '.join(BUNDLED_NAMES)})"
    )


def _from_hub(model: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        for kind in HUB_WEIGHTS if weights else [""]:
            patterns = [*HUB_FILES, *filter(None, [kind])]
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
            if not kind or any(folder.glob(kind)):
                break
        return folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ValueError(f"cannot get {model}{at} from the hub: {error}") from error


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file of a checkpoint; `ValueError` names the file and the fault."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"{path}: larger than {LARGEST_JSON} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
