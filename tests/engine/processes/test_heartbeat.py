"""Values written by one process are read consistently by another."""

from __future__ import annotations

import subprocess
import sys

from stoker_engine.processes.heartbeat import Heartbeat, Phase

from ...support.waiting import until

_WRITER = """
import sys
from stoker_engine.processes.heartbeat import Phase, Heartbeat
word = Heartbeat(int(sys.argv[1]))
while True:
    word.enter(Phase.STEPPING)
    word.enter(Phase.IDLE)
"""


def test_a_reader_never_sees_a_partial_value() -> None:
    word = Heartbeat()
    word.enter(Phase.IDLE)
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(word.fd)], pass_fds=(word.fd,)) as writer:
        seen, longest = set[Phase](), 0.0
        try:
            until(lambda: word.phase == Phase.STEPPING)
            for _ in range(200_000):
                longest = max(longest, word.busy_for)
                seen.add(word.phase)
        finally:
            writer.kill()
    assert seen == {Phase.IDLE, Phase.STEPPING}
    assert longest < 10, "a torn read would give the uptime of the machine"


def test_only_working_phases_count_as_busy() -> None:
    word = Heartbeat()
    for phase in Phase:
        word.enter(phase)
        if phase.is_work:
            until(lambda: word.busy_for > 0)
        assert (word.busy_for > 0) == phase.is_work
