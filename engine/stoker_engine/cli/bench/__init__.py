"""``stoker bench``: measure a server (`serve`), or the engine without a server (`throughput`, `latency`).

Flags, data sets and results have the names of ``vllm bench``, so that results can be compared.
"""

from __future__ import annotations

import difflib
import sys

from stoker_engine.cli import command_line

_USAGE = """usage: stoker bench {serve,throughput,latency} ...

  serve        send requests to a running server: TTFT, TPOT, ITL and end-to-end latency
  throughput   run many requests through the engine offline: tokens per second; --profile splits the time of a step
  latency      run one batch repeatedly: seconds per batch

stoker bench KIND --help shows the options"""


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    from stoker_engine.cli.bench import latency, serving, throughput

    kinds = {"serve": serving.main, "throughput": throughput.main, "latency": latency.main}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] not in kinds:
        close = difflib.get_close_matches(arguments[0], kinds, n=1)
        hint = f"did you mean {close[0]}?" if close else f"available: {', '.join(kinds)}"
        print(f"stoker bench: unknown benchmark {arguments[0]!r}; {hint}", file=sys.stderr)
        return 2
    return command_line.run(f"stoker bench {arguments[0]}", lambda: kinds[arguments[0]](arguments[1:]))
