"""What one process writes, another reads whole."""

from __future__ import annotations

import subprocess
import sys
import time

from stoker_engine.processes.status_word import Stage, StatusWord

_WRITER = """
import sys
from stoker_engine.processes.status_word import Stage, StatusWord
word = StatusWord(int(sys.argv[1]))
while True:
    word.enter(Stage.STEPPING)
    word.enter(Stage.IDLE)
"""


def test_a_reader_never_sees_half_a_word() -> None:
    word = StatusWord()
    word.enter(Stage.IDLE)
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(word.fd)], pass_fds=(word.fd,)) as writer:
        seen, longest = set[Stage](), 0.0
        deadline = time.monotonic() + 20
        try:
            while Stage.STEPPING not in seen and time.monotonic() < deadline:
                seen.add(word.stage)
            for _ in range(200_000):
                longest = max(longest, word.busy_for)
                seen.add(word.stage)
        finally:
            writer.kill()
    assert seen == {Stage.IDLE, Stage.STEPPING}
    assert longest < 10, "the uptime of the machine: a time that was not there"


def test_only_work_takes_time() -> None:
    word = StatusWord()
    for stage in Stage:
        word.enter(stage)
        time.sleep(0.01)
        assert (word.busy_for > 0) == stage.is_work
