"""Runs the end-to-end tests: `python e2e/run.py [PYTEST OPTION...]`.

Tests that need only an API server run concurrently with those on a cluster. Both mostly wait, so that together they
take little longer than one of them. The output of the cluster's tests is shown at once, that of the others afterwards.
Ctrl-C reaches both from the terminal, and both clean up; SIGTERM is forwarded to them as SIGINT.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

E2E = Path(__file__).resolve().parent
ALONE = E2E / "apiserver"
#: Time for a stopped part to clean up, in seconds.
CLEAN_UP = 180


def main(options: list[str]) -> int:
    """Return pytest's exit status: 0, that of the first part that fails, or 5 if no test matches."""
    command = [sys.executable, "-P", "-m", "pytest", "--durations=20", "--durations-min=15", *options]
    with tempfile.TemporaryFile() as output:
        parts = [
            subprocess.Popen([*command, E2E, f"--ignore={ALONE}"]),
            subprocess.Popen([*command, ALONE], stdout=output, stderr=subprocess.STDOUT),
        ]
        try:
            statuses = [part.wait() for part in parts]
        except KeyboardInterrupt:
            statuses = [part.wait() for part in parts]
        except SystemExit:  # only this process received the signal
            for part in parts:
                part.send_signal(signal.SIGINT)
            for part in parts:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    part.wait(CLEAN_UP)
            raise
        finally:
            for part in parts:
                part.terminate()
        output.seek(0)
        sys.stdout.buffer.write(b"\nMeanwhile, on an API server alone:\n\n" + output.read())
    failed = [status for status in statuses if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)]
    return failed[0] if failed else min(statuses)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs and their children ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
