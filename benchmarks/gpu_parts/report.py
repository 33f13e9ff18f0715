"""The report of a run: JSON, a Markdown table with bounds and goals, and charts of the shares of the bounds."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_parts.figures import TIMES, Figure
from gpu_parts.goals import goal_of, reaches
from gpu_parts.roofline import Roofline
from stoker_common.bar_chart import Bar, BarChart

#: Width of the chart in the Markdown file, in characters.
_CHART_COLUMNS = 110


@dataclass
class Report:
    """Results of a run so far.

    Attributes:
        title: name of the device and versions.
        parts: what became of each part: "done in 12 s", or why it has no or only some figures.
    """

    title: str
    figures: list[Figure] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def roofline(self) -> Roofline:
        """The machine's speeds."""
        return Roofline.of(self.figures)

    def write(self, target: Path) -> None:
        """Write ``target``.json and .md."""
        whole = {"title": self.title, "parts": self.parts, "figures": [self._as_json(each) for each in self.figures]}
        for suffix, text in ((".json", json.dumps(whole, indent=1) + "\n"), (".md", self.markdown(target.name))):
            written = target.with_suffix(suffix + ".new")
            written.write_text(text)
            written.replace(target.with_suffix(suffix))

    def line(self, figure: Figure) -> str:
        """Return a figure as one line of text."""
        value, bound, goal, peers, _ = self._cells(figure)
        further = [f"bound {bound}"] * (bound != "–") + [f"goal {goal}"] * (goal != "–") + [peers] * (peers != "–")
        return f"{figure.title}: {value}" + (f" ({'; '.join(further)})" if further else "")

    def markdown(self, name: str) -> str:
        """Return the report in Markdown; `name`: name of the files without suffix."""
        parts = [
            f"# {self.title}",
            "*Bound*: the best possible value by the copy and the GEMMs that were measured in this run, and the share "
            "of it that is reached; only the work that no engine can avoid is counted. *Goal*: a value for an H100 of "
            "80 GB, or relative to other figures of this run; ✓: reached. The models have random weights.",
            self._table(),
            "```text\n" + "\n".join(self._chart()) + "\n```",
        ]
        if _has_matplotlib():
            parts.append(f"![shares of the bounds]({name}.svg)")
        parts.append("\n".join(f"- {part}: {outcome}" for part, outcome in self.parts.items()))
        return "\n\n".join(part for part in parts if part) + "\n"

    def draw(self, target: Path) -> None:
        """Draw ``target``.svg, if matplotlib is installed."""
        bars = self._shares()
        if not bars or not _has_matplotlib():
            return
        import matplotlib

        matplotlib.use("svg")
        matplotlib.rcParams.update({"svg.hashsalt": "stoker", "svg.fonttype": "none"})  # small and reproducible
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 0.25 * len(bars) + 1))
        titles, shares = zip(*reversed(bars), strict=True)
        drawn = axes.barh(titles, shares, color="tab:blue")
        axes.bar_label(drawn, [f"{share:.0%}" for share in shares], fontsize=8)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(f"share of the bound: {self.title}", fontsize=9)
        axes.tick_params(labelsize=8)
        figure.tight_layout()
        figure.savefig(target.with_suffix(".svg"), metadata={"Date": None})

    def _as_json(self, figure: Figure) -> dict[str, Any]:
        by_key = {each.key: each for each in self.figures}
        return {**asdict(figure), "bound": self.roofline.bound(figure), "goal": goal_of(figure, by_key)}

    def _cells(self, figure: Figure) -> tuple[str, str, str, str, str]:
        """Return value, bound, goal, peers and settings as text."""
        bound, goal = self.roofline.bound(figure), goal_of(figure, {each.key: each for each in self.figures})
        sign = "≤" if figure.unit in TIMES else "≥"
        return (
            f"{number(figure.value)} {figure.unit}",
            "–" if bound is None else f"{number(bound)} ({share(figure, bound):.0%})",
            "–" if goal is None else f"{sign} {number(goal)}{' ✓' if reaches(figure, goal) else ''}",
            ", ".join(f"{name} {number(value)}" for name, value in figure.peers.items()) or "–",
            figure.settings or "–",
        )

    def _table(self) -> str:
        lines = ["| what | measured | bound | goal | peers | settings |", "|---|---:|---:|---:|---|---|"]
        lines += [f"| {each.title} | {' | '.join(self._cells(each))} |" for each in self.figures]
        return "\n".join(lines)

    def _shares(self) -> list[tuple[str, float]]:
        bounds = [(each, self.roofline.bound(each)) for each in self.figures]
        return [(each.title, share(each, bound)) for each, bound in bounds if bound is not None]

    def _chart(self) -> list[str]:
        bars = [Bar(title, (reached,), f"{reached:.0%} of the bound") for title, reached in self._shares()]
        return BarChart(_CHART_COLUMNS).plain(bars)


def share(figure: Figure, bound: float) -> float:
    """Return the share of the bound that a figure reaches: 1 is the bound."""
    return bound / figure.value if figure.unit in TIMES else figure.value / bound


def number(value: float) -> str:
    """Return a number with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
