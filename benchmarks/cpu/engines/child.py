"""An engine's process: a library behind `worker`, or a server. It is stopped with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from workloads import Workload

from cpu.engines.engine import Finished
from cpu.environments import CannotRunError, environ, last_lines
from cpu.workloads import Room

START_S: Final = 900  # seconds; one of the engines compiles the model
RUN_S: Final = 1800


class Child:
    """A process in its own process group, whose output goes to a log file."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, **pipes: Any) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w") as output:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": output, **pipes}
            self.process = subprocess.Popen(command, env=environ(env), stderr=output, start_new_session=True, **pipes)

    def failed(self, doing: str) -> CannotRunError:
        """Return the error to raise, with the end of the log."""
        return CannotRunError(f"{doing}: {last_lines(self.log)} (full log: {self.log})")

    def close(self) -> None:
        """Send the process group SIGTERM, and SIGKILL when its first process has ended, or after 20 s."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=20)


class Worker(Child):
    """A library behind `worker`."""

    def __init__(
        self, python: str, module: str, folder: Path, room: Room, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        command = [python, "-m", "cpu.engines.worker", module, str(folder), str(room.longest)]
        super().__init__(command, log, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.version = str(self._answer("it did not start", START_S)["version"])
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload) -> Finished:
        """See `Running.run`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(workload.requests).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failed(f"it ended before {workload.name}") from None
        return Finished(**self._answer(f"no response to {workload.name}", RUN_S))

    def _answer(self, otherwise: str, within_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], within_s)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            raise self.failed(otherwise)
        answer: dict[str, Any] = json.loads(line)
        return answer
