"""The table of the scenarios' measurements."""

from __future__ import annotations

from dataclasses import dataclass, field

from kit.traffic import Result

_HEAD = "| scenario | requests sent | failed | cut | longest gap | recovery |\n|---|---|---|---|---|---|"


@dataclass
class Results:
    """Rows in the order of measurement."""

    rows: list[str] = field(default_factory=list)

    def add(self, scenario: str, flow: Result | None = None, recovery: float | None = None) -> None:
        """Add a scenario: its traffic, and the seconds until full recovery."""
        cells = [scenario]
        cells += [str(flow.sent), str(len(flow.failed)), str(len(flow.cut))] if flow else ["–"] * 3
        cells += [f"{flow.longest_gap:.1f} s" if flow else "–", f"{recovery:.0f} s" if recovery is not None else "–"]
        self.rows.append(f"| {' | '.join(cells)} |")

    def table(self) -> str:
        """Return the table in Markdown."""
        return "\n".join([_HEAD, *self.rows])
