"""What was measured, as it is written to the JSON file."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OURS = "stoker"


@dataclass
class Row:
    """One engine's rounds of a workload.

    Attributes:
        speeds: tokens a second, a number a round; of the output, or of the prompt where only that is read.
        shares: of the roofline, a number a round, by the ceilings of the same minute.
        ceiling: which of the two held: ``GEMM`` or ``memory``.
        noisy: rounds before which the machine did not become quiet.
        run: the date and commit of the run, in a report that several runs are merged into; else empty.
    """

    model: str
    workload: str
    engine: str
    version: str
    speeds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    ceiling: str = ""
    noisy: int = 0
    run: str = ""

    @property
    def speed(self) -> float:
        """The median, in tokens a second."""
        return statistics.median(self.speeds)

    @property
    def share(self) -> float:
        """The median."""
        return statistics.median(self.shares)


@dataclass
class Results:
    """A run.

    Attributes:
        commit: the repository's, with ``+`` where it had changes.
        read_bytes: bytes a second that memory was read at, at the best of the run.
        gemm_flops: operations a second of torch's bfloat16 product, at the best of the run.
        left_out: engines that could not be measured, or not in full → the cause.
    """

    date: str
    commit: str
    processor: str
    cpus: int
    read_bytes: float = 0
    gemm_flops: float = 0
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def row(self, model: str, workload: str, engine: str) -> Row | None:
        """The one of these, if it was measured."""
        return next((r for r in self.rows if (r.model, r.workload, r.engine) == (model, workload, engine)), None)

    def best_peer(self, model: str, workload: str) -> Row | None:
        """The fastest of the others."""
        peers = [r for r in self.rows if (r.model, r.workload) == (model, workload) and r.engine != OURS]
        return max(peers, key=lambda row: row.speed, default=None)

    def ratio(self, model: str, workload: str) -> float | None:
        """Our median by the best peer's."""
        stoker_row, best = self.row(model, workload, OURS), self.best_peer(model, workload)
        return stoker_row.speed / best.speed if stoker_row and best else None

    def write(self, path: Path) -> None:
        """Writes JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `write` wrote."""
        found: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**found, "rows": [Row(**row) for row in found["rows"]]})
