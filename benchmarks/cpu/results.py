"""Results of a run, as written to the JSON file."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OURS = "stoker"


@dataclass
class Row:
    """Results of one engine for a workload.

    Attributes:
        speeds: tokens/s, one value per round; of output tokens, or of prompt tokens for prefill workloads.
        shares: shares of the roofline, one value per round, by ceilings measured in the same minute.
        ceiling: the limiting ceiling: ``GEMM`` or ``memory``.
        noisy: number of rounds on a busy machine.
        run: date and commit of the run in a merged report; else empty.
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
        """Return the median of the speeds, in tokens/s."""
        return statistics.median(self.speeds)

    @property
    def share(self) -> float:
        """Return the median of the shares."""
        return statistics.median(self.shares)


@dataclass
class Results:
    """A run.

    Attributes:
        commit: the repository's commit, with ``+`` if files were modified.
        read_bytes: highest measured memory bandwidth, in bytes/s of reads.
        gemm_flops: highest measured FLOP/s of torch's bfloat16 GEMM.
        left_out: maps what was not measured, or not fully, to the cause.
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
        """Return the row of a model, workload and engine, or None if it was not measured."""
        return next((r for r in self.rows if (r.model, r.workload, r.engine) == (model, workload, engine)), None)

    def best_peer(self, model: str, workload: str) -> Row | None:
        """Return the row of the fastest other engine, or None."""
        peers = [r for r in self.rows if (r.model, r.workload) == (model, workload) and r.engine != OURS]
        return max(peers, key=lambda row: row.speed, default=None)

    def ratio(self, model: str, workload: str) -> float | None:
        """Return Stoker's median speed as a multiple of the best peer's, or None."""
        stoker_row, best = self.row(model, workload, OURS), self.best_peer(model, workload)
        return stoker_row.speed / best.speed if stoker_row and best else None

    def write(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read what `write` wrote."""
        found: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**found, "rows": [Row(**row) for row in found["rows"]]})
