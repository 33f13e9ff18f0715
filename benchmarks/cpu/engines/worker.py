"""An engine that is a Python library, in a process of its own with its own environment.

    python -m cpu.engines.worker MODULE FOLDER LONGEST

The module's ``load(folder, longest, cpus)``, with the tokens of the longest sequence, gives the engine's version and a
function from requests to the numbers of tokens they got. The process reads a line of JSON a workload, and answers in a
line with the time it took. This file imports nothing but Python's own, as it runs in every engine's environment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

#: (prompt, tokens to generate) each → tokens got each.
Generate = Callable[[list[tuple[list[int], int]]], list[int]]


def main() -> None:
    """Serves until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    module, folder, longest = sys.argv[1:]
    os.dup2(2, 1)  # what the library prints goes to the log
    version, generate = importlib.import_module(module).load(Path(folder), int(longest), os.cpu_count() or 1)
    answers.write(json.dumps({"version": version}) + "\n")
    for line in sys.stdin:
        requests = json.loads(line)
        started = time.perf_counter()
        counts = generate(requests)
        answers.write(json.dumps({"seconds": time.perf_counter() - started, "counts": counts}) + "\n")


if __name__ == "__main__":
    main()
