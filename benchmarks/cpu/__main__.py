"""Compare Stoker with other engines on this machine's CPU.

    make bench [WORKLOADS="W1 decode-8"] [PEERS=openvino,llama.cpp|none] [MODELS=gemma] [ROUNDS=5] [QUIET_S=60]
    make bench-quick

Every engine loads the same weights and gets the same token ids; sampling is greedy and ignores end of sequence. All
compute in bfloat16, except that some engines round activations to 8 bits with quantized weights (models *-q8_0,
*-q4_k_m, *-w8a8). Each engine has its own environment in the cache folder ($STOKER_BENCH_CACHE, default
~/.cache/stoker-bench), installed on first use. An engine that cannot be installed or fails is left out and reported
with the cause; the benchmark continues.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from machine import cpu_name

from cpu import history, plot
from cpu.engines import llama_cpp, openvino, stoker, transformers, vllm
from cpu.engines.engine import Engine, Running
from cpu.environments import BENCHMARKS, CannotRunError, cache_folder
from cpu.models import MODELS, Model, prepare
from cpu.report import report
from cpu.results import Results
from cpu.rounds import measure
from cpu.wait_idle import IdleWaiter
from cpu.workloads import GROUPS, Room, by_room, expand, workload

RESULTS = BENCHMARKS / "results"
HISTORY = "cpu-history.jsonl"

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (openvino, llama_cpp, vllm, transformers)}

INTERRUPTED = 130

#: Fast and most informative workloads, by model.
QUICK = {"A": ["W1", "W2", "decode-8", "prefill-1024"], "gemma-q4_k_m": ["decode-1", "decode-8", "prefill-1024"]}
QUICK_ROUNDS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1 if nothing was measured, or 130 after an interrupt, with the results so far written.

    With ``--quick``, an interrupt also returns 0. Wrong arguments exit with 2.
    """
    options = parse(arguments)
    cache = cache_folder()
    date = datetime.now(UTC)
    results = Results(date.strftime("%Y-%m-%d %H:%M"), commit(), cpu_name(), os.cpu_count() or 1)
    quiet = IdleWaiter(options.quiet_s)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that engines are stopped, too
    try:
        for name in options.models:
            workloads = QUICK[name] if options.quick else options.workloads
            run_model(name, options.peers, workloads, options.rounds, quiet, results, cache)
    except KeyboardInterrupt:
        results.left_out["the rest"] = "interrupted"
    if not results.rows:
        print("nothing was measured: " + "; ".join(f"{each}: {why}" for each, why in results.left_out.items()))
        return 1
    stem: Path = options.output or RESULTS / f"{date:%Y-%m-%d-%H%M}-cpu"
    before = stem.with_name(HISTORY)
    earlier = history.read(before)
    if options.quick:
        print("\n" + report(results, earlier, None))
        return 0
    results.write(stem.with_suffix(".json"))
    drawn = None
    try:
        drawn = plot.draw(stem.with_suffix(".json"), cache).name
    except CannotRunError as cause:
        results.left_out["the plot"] = str(cause)
    text = report(results, earlier, drawn)
    stem.with_suffix(".md").write_text(text)
    history.append(before, results)
    print(f"\n{text}\nwritten to {stem}.md, .json{' and .svg' if drawn else ''}; appended to {before}")
    return INTERRUPTED if "the rest" in results.left_out else 0


def run_model(
    name: str, peers: list[str], workloads: list[str], rounds: int, quiet: IdleWaiter, results: Results, cache: Path
) -> None:
    """Measure one model, by groups of workloads for which engines are started together."""
    print(f"Model {name}: {MODELS[name]}", flush=True)
    try:
        model = prepare(name, cache)
    except CannotRunError as cause:
        print(f"  model {name} is left out: {cause}", flush=True)
        results.left_out[f"model {name}"] = str(cause)
        return
    for room, together in by_room(workloads):
        room = replace(room, longest=min(room.longest, model.context))
        fitting = [each for each in together if room.holds(workload(each, seed=0))]
        for each in together:
            if each not in fitting:
                results.left_out[f"{each}, model {name}"] = f"its context is {model.context:,} tokens"
        if fitting:
            run_engines(model, room, peers, fitting, rounds, quiet, results, cache)


def run_engines(
    model: Model,
    room: Room,
    peers: list[str],
    workloads: list[str],
    rounds: int,
    quiet: IdleWaiter,
    results: Results,
    cache: Path,
) -> None:
    """Measure some workloads of a model: all engines are loaded at once, and alternate."""
    running: dict[str, Running] = {}
    try:
        for engine in (stoker, *(ENGINES[peer] for peer in peers)):
            try:
                running[engine.name] = engine.start(model, room, cache)
            except CannotRunError as cause:
                print(f"  {engine.name} is left out: {cause}", flush=True)
                results.left_out[f"{engine.name}, model {model.name}"] = str(cause)
        measure(model, running, workloads, rounds, quiet, results)
    finally:
        for each in running.values():
            each.close()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. Unknown names exit with 2 and a list of the known ones."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=",".join(GROUPS), help=f"default: {' '.join(GROUPS)}")
    parser.add_argument("--peers", default=",".join(ENGINES), help=f"any of {' '.join(ENGINES)}, or none; default: all")
    parser.add_argument("--models", default=",".join(MODELS), help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--rounds", type=_from(1), default=5, metavar="NUMBER")
    parser.add_argument(
        "--quiet-s",
        type=_from(0),
        default=60,
        metavar="S",
        help="longest wait for an idle machine before a measurement, in seconds",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="STEM",
        help="path of the report without suffix; default: results/DATE-TIME-cpu; the history is in the same folder",
    )
    parser.add_argument(
        "--quick", action="store_true", help="Stoker only, in two minutes; print the report, and write nothing"
    )
    options = parser.parse_args(arguments)
    try:
        options.workloads = expand(_words(options.workloads))
    except ValueError as error:
        parser.error(str(error))
    options.models = _known(parser, "model", _words(options.models), MODELS)
    options.peers = [] if options.peers == "none" else _known(parser, "peer", _words(options.peers), ENGINES)
    if options.quick:
        options.models, options.peers, options.rounds, options.quiet_s = list(QUICK), [], QUICK_ROUNDS, 1
    return options


def commit() -> str:
    """Return the repository's commit, with ``+`` if files were modified."""
    command = ["git", "-C", str(BENCHMARKS), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return number


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _known(parser: argparse.ArgumentParser, kind: str, names: list[str], there_are: Iterable[str]) -> list[str]:
    for name in names:
        if name not in there_are:
            parser.error(f"no {kind} {name!r}; there are {', '.join(there_are)}")
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
