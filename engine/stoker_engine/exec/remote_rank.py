"""A rank on another node.

Its pipe is a TCP connection, which breaks when the process ends or the node becomes unreachable. The node reports how
the process ended, and whether it is stopped.
"""

from __future__ import annotations

import select
from typing import Final

from stoker_common.errors import EngineDeadError, EngineKilledError, StokerError
from stoker_common.subprocesses.death import Died, cause_of_death
from stoker_engine.exec.rank import Rank
from stoker_engine.exec.rank_messages import Setup
from stoker_engine.nodes.node import Node

#: Maximum time for a node to start a rank's process, in seconds; also limited by the ranks' timeout.
_START_TIMEOUT_S: Final = 60.0


class RemoteRank(Rank):
    """A rank's process on another node. It starts immediately, and loads when it gets the engine's arguments.

    Raises:
        EngineDeadError: the node cannot start it in time.
    """

    def __init__(self, setup: Setup, node: Node) -> None:
        self._node, self._number = node, setup.rank
        self._state, pipe = node.start(setup.rank, min(_START_TIMEOUT_S, setup.timeout_s))
        super().__init__(f"rank {setup.rank} of {setup.layout.size} on {node.name}", pipe, setup, node.model)

    @property
    def is_stopped(self) -> bool:
        """See `Rank`."""
        return self._state.is_stopped and not self._state.has_ended

    def wait(self, timeout_s: float) -> bool:
        """See `Rank`."""
        return self._node.wait(lambda: self._state.has_ended, timeout_s)

    def kill(self) -> None:
        """See `Rank`."""
        if self.wait(0):
            return
        if not self._pipe_is_over():
            self.was_killed, self.was_stopped = True, self.is_stopped
        self._node.kill(self._number)

    def cause_of_death(self, last: Died | None) -> StokerError:
        """See `Rank`."""
        if self._state.code is not None:
            return cause_of_death(self._state.code, last, self._state.killed_for_memory, self.name)
        if self._node.cause_of_loss is not None:
            return EngineKilledError(f"{self.name} is gone with its node: {self._node.cause_of_loss}")
        return EngineDeadError(f"{self.name} ended, and its node did not report why")

    def __str__(self) -> str:
        """Return the name, which includes the node."""
        return self.name

    def _pipe_is_over(self) -> bool:
        """Whether the rank has closed its end of the connection, or the connection is broken."""
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))
