"""The README's chart: one model's tokens per second by workload and engine.

    cd benchmarks && python -m cpu.overview results/cpu-amx.json gemma ../docs/images/speed.svg

Needs matplotlib; `plot.py` has an environment with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from cpu.results import OURS, Results

PANELS: Final = {
    "W1": "1 request",
    "W2": "32 mixed requests",
    "decode-32": "decoding 32 streams",
    "prefill-1024": "a prompt of 1,024",
}
NAMES: Final = {OURS: "Stoker", "openvino": "OpenVINO", "llama.cpp": "llama.cpp", "vllm": "vLLM"}
#: Readable on light and on dark pages.
INK: Final = "#808080"


def write(results: Results, model: str, target: Path) -> None:
    """Write the SVG: a panel for each workload, with a bar for each engine."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "stoker", "svg.fonttype": "none", "text.color": INK, "font.size": 9})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(9.5, 1.7), sharey=True)
    figure.patch.set_alpha(0)
    names = [*reversed(NAMES)]
    for panel, (workload, title) in zip(panels, PANELS.items(), strict=True):
        rows = [results.row(model, workload, name) for name in names]
        speeds = [row.speed if row else 0 for row in rows]
        bars = panel.barh(
            [NAMES[name] for name in names], speeds, color=["#d9541e" if name == OURS else "#9aa5b1" for name in names]
        )
        panel.bar_label(bars, [f"{speed:,.0f}" if speed else "–" for speed in speeds], padding=3)
        panel.set_title(title, fontsize=9)
        panel.set_xlim(0, max(speeds) * 1.3)
        panel.set_facecolor("none")
        panel.tick_params(left=False, bottom=False, labelbottom=False, colors=INK)
        for spine in panel.spines.values():
            spine.set_visible(False)
    figure.tight_layout(w_pad=1)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    write(Results.read(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
