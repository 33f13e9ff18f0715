"""The history: one JSON line per row of every run, to detect regressions.

Each row is compared with the last earlier one of the same processor, model, workload and engine, by the share of the
roofline: the speed of shared machines varies from day to day, and the ceilings are measured in the same minute. Rows
with mostly busy rounds are kept, but never used as the reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cpu.results import Results, Row


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines, oldest first."""
    return [json.loads(line) for line in path.read_text().strip("\n").split("\n") if line] if path.is_file() else []


def change(row: Row, processor: str, lines: list[dict[str, Any]]) -> float | None:
    """Return the change of the roofline share since the last quiet row of this kind (0.1: 10 % more), or None."""
    kind = (processor, row.model, row.workload, row.engine)
    for line in reversed(lines):
        is_quiet = 2 * line["noisy"] <= line["rounds"]
        if is_quiet and (line["processor"], line["model"], line["workload"], line["engine"]) == kind:
            return row.share / float(line["share"]) - 1
    return None


def append(path: Path, results: Results) -> None:
    """Append a run's rows."""
    with path.open("a") as history:
        for row in results.rows:
            line = {
                "date": results.date,
                "commit": results.commit,
                "processor": results.processor,
                "model": row.model,
                "workload": row.workload,
                "engine": row.engine,
                "version": row.version,
                "tokens_per_s": round(row.speed, 2),
                "share": round(row.share, 4),
                "ceiling": row.ceiling,
                "rounds": len(row.speeds),
                "noisy": row.noisy,
            }
            history.write(json.dumps(line, ensure_ascii=False) + "\n")
