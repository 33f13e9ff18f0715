"""The current report of a machine: for each model and workload, the newest run that measured it.

    cd benchmarks && python -m cpu.current results/cpu-amx results/2026-11-27-1640-cpu.json...

It writes STEM.json and STEM.md. An existing STEM.json is merged, so that the files of runs can be deleted: their
results stay in the report until they are measured again, and in the history forever.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cpu.report import report
from cpu.results import Results, Row


def merge(runs: Sequence[Results]) -> Results:
    """Merge runs: for each model and workload, take the rows of the newest run that has any.

    Raises:
        ValueError: there are no runs, or runs of several processors.
    """
    if len({run.processor for run in runs}) != 1:
        raise ValueError(f"all runs must be of one processor, not {sorted({run.processor for run in runs})}")
    by_date = sorted(runs, key=lambda run: run.date)
    rows: dict[tuple[str, str], list[Row]] = {}
    for run in by_date:
        measured = [replace(row, run=row.run or f"{run.date}, {run.commit}") for row in run.rows]
        for kind in dict.fromkeys((row.model, row.workload) for row in measured):
            found = [row for row in measured if (row.model, row.workload) == kind]
            if kind not in rows or found[0].run >= rows[kind][0].run:
                rows[kind] = found
    newest = by_date[-1]
    return replace(
        newest,
        read_bytes=max(run.read_bytes for run in runs),
        gemm_flops=max(run.gemm_flops for run in runs),
        rows=[row for kind in sorted(rows, key=_natural) for row in rows[kind]],
        left_out={},
    )


def _natural(kind: tuple[str, str]) -> list[tuple[str, int]]:
    """Sort key that orders decode-2 before decode-16."""
    return [(text, int(number or 0)) for name in kind for text, number in re.findall(r"(\D+)(\d*)", name)]


def main(stem: Path, runs: Sequence[Path]) -> None:
    """Write the merged report of these runs and of an existing report."""
    current = stem.with_suffix(".json")
    merged = merge([Results.read(path) for path in ([current] if current.is_file() else []) + list(runs)])
    merged.write(current)
    stem.with_suffix(".md").write_text(report(merged, [], None))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
