"""A picture of a benchmark's rows: one line for each series, its floor dashed. Needs matplotlib."""

from collections import defaultdict

AXES = ("concurrency", "batch", "context")
FIGURES = ("step_ms", "tokens_per_s", "us", "ttft_ms", "tpot_ms")
# Where steps give more than a token a sequence their time alone says little.
FIGURE_OF = {"spec": "tokens_per_s"}

Row = dict[str, object]


def draw(path: str, bench: str, rows: list[Row]):
    """Save the first figure that the rows have, over the label that varies most."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: install limelight-serve[bench]") from error
    along = max(AXES, key=lambda name: len({row[name] for row in rows if name in row}))
    figure_name = FIGURE_OF.get(bench) or next(name for name in FIGURES if name in rows[0])
    canvas = Figure(figsize=(7, 4.5), layout="constrained")
    axes = canvas.subplots()
    for series, points in _series(rows, along).items():
        x = [number(row[along]) for row in points]
        line = axes.plot(x, [number(row[figure_name]) for row in points], "o-", label=series)
        if figure_name == "step_ms" and "floor_ms" in points[0]:
            floor = [number(row["floor_ms"]) for row in points]
            axes.plot(x, floor, "--", color=line[0].get_color(), label=f"{series}, floor")
    axes.set(title=bench, xlabel=along, ylabel=figure_name, xscale="log", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    canvas.savefig(path)


def _series(rows: list[Row], along: str) -> dict[str, list[Row]]:
    """The rows by what their other labels say, as far as these differ."""
    labels = [
        name
        for name in dict.fromkeys(key for row in rows for key in row)
        if name != along and len({str(row.get(name)) for row in rows}) > 1
    ]
    labels = [name for name in labels if isinstance(rows[0].get(name), str) or name in AXES]
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[", ".join(f"{name} {row.get(name)}" for name in labels) or "limelight"].append(row)
    return found


def number(value: object) -> float:
    """A figure's median, or a label's own value."""
    value = value["median"] if isinstance(value, dict) else value
    assert isinstance(value, (int, float))
    return value
