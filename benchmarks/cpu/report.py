"""The Markdown report of a run."""

from __future__ import annotations

from typing import Any

from cpu.history import change
from cpu.models import MODELS
from cpu.results import OURS, Results, Row


def report(results: Results, history: list[dict[str, Any]], plot: str | None) -> str:
    """Return the report in Markdown.

    Args:
        history: earlier runs.
        plot: file name of the plot next to the report, if it exists.
    """
    versions = {row.engine: row.version for row in results.rows if row.engine != OURS}
    counts = sorted({len(row.speeds) for row in results.rows})
    rounds = f"{counts[0]} to {counts[-1]}" if counts[1:] else str(counts[0])
    is_merged = any(row.run for row in results.rows)
    earlier = " and earlier" if is_merged else ""
    last = (
        "*Run* is the date and commit of the newest run that measured the workload."
        if is_merged
        else "*change* its difference from the last run on this processor in the history."
    )
    beside = (
        f" Compared with {', '.join(f'{name} {version}' for name, version in versions.items())}." if versions else ""
    )
    parts = [
        f"# CPU, {results.date}",
        f"{results.processor}, {results.cpus} CPUs, commit {results.commit}{earlier}; memory read "
        f"{results.read_bytes / 1e9:.1f} GB/s, bfloat16 GEMM {results.gemm_flops / 1e9:.0f} GFLOP/s at best.{beside}",
        f"Tokens per second: median of {rounds} rounds (minimum–maximum). Engines got the same tokens and alternated. "
        "*Share* is Stoker's share of the roofline, by ceilings measured in the same minute, " + last,
    ]
    if plot:
        parts.append(f"![ratios and shares]({plot})")
    for model in dict.fromkeys(row.model for row in results.rows):
        parts += [f"## Model {model}: {MODELS[model]}", _table(results, model, history)]
    noisy = [f"{r.model} {r.workload} {r.engine} ({r.noisy} of {len(r.speeds)})" for r in results.rows if r.noisy]
    if noisy:
        parts.append(f"Rounds on a busy machine: {', '.join(noisy)}.")
    parts += [f"Left out: {engine}: {cause}" for engine, cause in results.left_out.items()]
    return "\n\n".join(parts) + "\n"


def _table(results: Results, model: str, history: list[dict[str, Any]]) -> str:
    rows = [row for row in results.rows if row.model == model]
    engines = list(dict.fromkeys(row.engine for row in rows))
    peers = len(engines) > 1
    is_merged = any(row.run for row in rows)
    lines = []
    for workload in dict.fromkeys(row.workload for row in rows):
        of_engines = [results.row(model, workload, engine) for engine in engines]
        line = [workload, *("–" if row is None else _speed(row) for row in of_engines)]
        if peers:
            ratio, best = results.ratio(model, workload), results.best_peer(model, workload)
            line.append(f"{ratio:.2f} ({best.engine})" if ratio and best else "–")
        if stoker_row := results.row(model, workload, OURS):
            changed = None if is_merged else change(stoker_row, results.processor, history)
            line += [
                f"{stoker_row.share:.0%} of {stoker_row.ceiling}",
                stoker_row.run or ("–" if changed is None else f"{changed:+.1%}"),
            ]
        lines.append(line)
    headers = [
        "workload",
        *engines,
        *(["Stoker ÷ best peer"] if peers else []),
        "share",
        "run" if is_merged else "change",
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *lines))


def _speed(row: Row) -> str:
    return f"{row.speed:.1f} ({min(row.speeds):.1f}–{max(row.speeds):.1f})"
