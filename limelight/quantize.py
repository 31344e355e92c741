"""`limelight quantize`: a checkpoint in BF16, FP16 or FP32 to one in NVFP4 or MXFP8.

It goes tensor by tensor, so that memory holds a few of them and never the model.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from limelight.checkpoint import BUNDLED_NAMES, locate, read_json
from limelight.conversion import gguf, modelopt, mxfp8
from limelight.conversion.job import Job
from limelight.conversion.sources import find_sources
from limelight.models.layers import Placement
from limelight.models.loader import build, read_config
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress

# For each format what refuses a model, and what plans: the bytes, about, and what writes them.
FORMATS = {
    "gguf-nvfp4": (gguf.check, gguf.plan),
    "modelopt-nvfp4": (modelopt.check, modelopt.plan),
    "mxfp8": (mxfp8.check, mxfp8.plan),
}


def quantize(
    source: str, into: str, *, format: str, device: str = "auto", progress: Progress
) -> list[dict[str, object]]:
    """Write `source` (bundled model, folder or hub id) to `into`; a row for each kind of tensor.

    Raises `ValueError` before anything is written where it cannot be done, and `OSError` if writing
    fails; then nothing of `into` is left.
    """
    path = Path(into).expanduser()
    _check_target(path, format)
    where = _device(device)
    check, plan = FORMATS[format]
    # Without its weights first: what is refused need not be downloaded.
    folder = locate(source, weights=False)
    _check_not_quantized(folder)
    outline = Placement(Mesh.single(), torch.float32, torch.device("cpu"), outline=True)
    model = build(*read_config(folder), outline)
    check(model)
    folder = locate(source)
    sources = find_sources(folder, model)
    size, write = plan(model, sources)
    if (free := shutil.disk_usage(path.parent).free) < size:
        raise OSError(f"{path}: {size:,} bytes are to be written, but only {free:,} are free")
    total = sum(source.nbytes for parts in sources.values() for source in parts)
    with (
        _whole_or_nothing(path) as partial,
        progress.phase("quantizing", total, unit="bytes") as advance,
        torch.no_grad(),
    ):
        job = Job(folder, where, advance)
        write(job, partial)
    return job.report()


def _check_target(path: Path, format: str):
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path} exists already; choose another name")
    if str(path) in BUNDLED_NAMES:
        raise ValueError(f"{path} is the name of a bundled model; choose another name")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder")
    if (path.suffix == ".gguf") != (format == "gguf-nvfp4"):
        kind = "a file NAME.gguf" if format == "gguf-nvfp4" else "a folder"
        raise ValueError(f"{path}: --format {format} writes {kind}")
    if (partial := _partial(path)).exists():
        raise ValueError(f"{partial} is left of a run that was killed, or one goes on; remove it")


def _check_not_quantized(folder: Path):
    """Sooner and plainer than the types of its tensors would tell."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give a folder with config.json and .safetensors")
    quantized = read_json(folder / "config.json").get("quantization_config") is not None
    if quantized or (folder / "hf_quant_config.json").exists():
        raise ValueError(f"{folder} is quantized already; give the checkpoint that it was made of")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no NVIDIA GPU that torch can use")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


@contextmanager
def _whole_or_nothing(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` in the end; removed if that fails."""
    partial = _partial(path)
    try:
        yield partial
        partial.rename(path)
    except BaseException as error:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"{path} could not be written and was removed: {error}") from error
        raise


def show(rows: list[dict[str, object]]) -> None:
    """Print the report as a table."""
    table = Table()
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    Console(highlight=False).print(table)


def _cell(name: str, value: object) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.2%}" if name.startswith("relative") else f"{value:.3g}"
        case int():
            return f"{value:,}"
    return str(value)
