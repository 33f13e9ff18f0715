"""The plot of a run: ratio of Stoker's speed to the best peer's, and every engine's share of the roofline.

    python -m cpu.plot RESULTS.json PLOT.svg

It runs in its own environment, which `draw` installs, because only the plot needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cpu.environments import Step, once, pip, python_of, steps_into
from cpu.results import OURS, Results

MATPLOTLIB = "matplotlib==3.10.*"


def draw(results: Path, cache: Path) -> Path:
    """Draw the plot of a JSON file next to it. Raises `CannotRunError` if matplotlib cannot be installed."""

    def install(folder: Path, step: Step) -> None:
        step("an environment", [sys.executable, "-m", "venv", str(folder)])
        step("matplotlib", [*pip(folder), MATPLOTLIB])

    python = python_of(once(cache / "plot", MATPLOTLIB, install))
    target = results.with_suffix(".svg")

    steps_into(cache / "logs" / "plot.log")("the plot", [python, "-m", "cpu.plot", str(results), str(target)])
    return target


def write(results: Results, target: Path) -> None:
    """Write the SVG: per model a row of two panels, or only the shares if there are no peers."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "stoker", "svg.fonttype": "none"})  # small and reproducible
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.model for row in results.rows))
    columns = 2 if any(row.engine != OURS for row in results.rows) else 1
    figure, panels = pyplot.subplots(len(models), columns, figsize=(7 * columns, 3.2 * len(models)), squeeze=False)
    for model, (*ratios, shares) in zip(models, panels, strict=True):
        rows = [row for row in results.rows if row.model == model]
        names = list(dict.fromkeys(row.workload for row in rows))
        engines = list(dict.fromkeys(row.engine for row in rows))
        for panel in ratios:
            found = [results.ratio(model, name) or 0 for name in names]
            bars = panel.bar(names, found, color=["tab:green" if ratio >= 1 else "tab:red" for ratio in found])
            panel.bar_label(bars, [f"{ratio:.2f}" if ratio else "" for ratio in found], fontsize=8)
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set_title(f"{model}: Stoker ÷ the best peer")
        width = 0.8 / len(engines)
        for index, engine in enumerate(engines):
            measured = [results.row(model, name, engine) for name in names]
            positions = [
                index_of_workload + (index - (len(engines) - 1) / 2) * width for index_of_workload in range(len(names))
            ]
            heights = [row.share if row else 0 for row in measured]
            color = "black" if engine == OURS else None
            shares.bar(positions, heights, width, label=engine, color=color)
        shares.set_xticks(range(len(names)), names)
        shares.set_title(f"{model}: share of the roofline")
        shares.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        for panel in (*ratios, shares):
            panel.tick_params(axis="x", labelrotation=45, labelsize=8)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    write(Results.read(Path(sys.argv[1])), Path(sys.argv[2]))
