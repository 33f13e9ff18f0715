"""``stoker bench``: how fast a server answers (`serve`), how fast the engine is without one (`throughput`, `latency`).

Names of flags, data sets and figures are those of ``vllm bench``, so that numbers can be laid side by side.
"""

from __future__ import annotations

import difflib
import sys

from stoker_engine.cli import command_line

_USAGE = """usage: stoker bench {serve,throughput,latency} ...

  serve        send requests to a running server: TTFT, TPOT, ITL and end-to-end latency
  throughput   run many requests through the engine offline: tokens a second; --profile says where the time goes
  latency      run one batch again and again: seconds a batch

stoker bench KIND --help says more"""


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    from stoker_engine.cli.bench import latency, serving, throughput

    kinds = {"serve": serving.main, "throughput": throughput.main, "latency": latency.main}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] not in kinds:
        close = difflib.get_close_matches(arguments[0], kinds, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(kinds)}"
        print(f"stoker bench: no {arguments[0]!r}; {hint}", file=sys.stderr)
        return 2
    return command_line.run(f"stoker bench {arguments[0]}", lambda: kinds[arguments[0]](arguments[1:]))
