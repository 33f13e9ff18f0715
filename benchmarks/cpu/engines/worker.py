"""Runs an engine that is a Python library, in its own process and environment.

    python -m cpu.engines.worker MODULE FOLDER LONGEST

The module's ``load(folder, longest, cpus)``, with the length of the longest sequence in tokens, returns the engine's
version and a function that runs requests (`Generate`). The process reads one line of JSON per workload, and responds
with one: duration and numbers of output tokens. This file imports only the standard library, because it runs in every
engine's environment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

#: Runs (prompt, tokens to generate) requests, and returns the number of output tokens of each.
Generate = Callable[[list[tuple[list[int], int]]], list[int]]


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    module, folder, longest = sys.argv[1:]
    os.dup2(2, 1)  # output of the library goes to the log
    version, generate = importlib.import_module(module).load(Path(folder), int(longest), os.cpu_count() or 1)
    answers.write(json.dumps({"version": version}) + "\n")
    for line in sys.stdin:
        requests = json.loads(line)
        started = time.perf_counter()
        counts = generate(requests)
        answers.write(json.dumps({"seconds": time.perf_counter() - started, "counts": counts}) + "\n")


if __name__ == "__main__":
    main()
