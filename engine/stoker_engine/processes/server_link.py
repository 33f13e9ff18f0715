"""What an engine process sends: to the server, and to the front ends if the server has several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.outputs import StepOutputs
from stoker_engine.processes.front_end_links import FrontEndGone, FrontEndLinks
from stoker_engine.processes.heartbeat import Heartbeat, Phase
from stoker_engine.processes.messages import MissingRanks, WaitingForNodes


class ServerLink:
    """The engine's end of its pipe.

    Args:
        connection: the pipe to the server.
        status: the engine's heartbeat.
        front_ends: links to several front ends; None: the server's process is the only one.
    """

    def __init__(self, connection: Connection, status: Heartbeat, front_ends: FrontEndLinks | None) -> None:
        self._connection, self._status, self._front_ends = connection, status, front_ends

    def send(self, message: Any) -> None:
        """Send a message to the server, and wait while the pipe is full. Ends this process if the pipe is closed."""
        self._status.enter(Phase.SENDING)
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the server has ended or closed the pipe
        self._status.enter(Phase.STEPPING)

    def send_outputs(self, outputs: StepOutputs) -> None:
        """Send the outputs of a step, if there are any, each part to the process that needs it."""
        if self._front_ends is not None:
            outputs = self._front_ends.send(outputs)
        if outputs.deltas or outputs.report is not None:
            self.send(outputs)

    def report_missing_ranks(self, ranks: Sequence[int]) -> None:
        """Report the ranks that have not loaded their part of the model yet."""
        self._report_loading(MissingRanks(tuple(ranks)))

    def report_waiting(self, reason: str) -> None:
        """Report which other nodes loading waits for; see `WaitingForNodes`."""
        self._report_loading(WaitingForNodes(reason))

    def serve_front_ends(self, info: EngineInfo) -> None:
        """Let the front ends send requests."""
        if self._front_ends is not None:
            self._front_ends.serve(info)

    def forget(self, front_end: FrontEndGone) -> Sequence[str]:
        """Forget a front end that has ended, and return the ids of its requests, which must be aborted."""
        assert self._front_ends is not None
        return self._front_ends.forget(front_end.link)

    def drop(self, request_id: str) -> None:
        """Forget a request that the engine has not accepted, after its end has been sent."""
        if self._front_ends is not None:
            self._front_ends.drop(request_id)

    def _report_loading(self, message: MissingRanks | WaitingForNodes) -> None:
        if self._front_ends is not None:
            self._front_ends.report_loading(message)
        self.send(message)
        self._status.enter(Phase.LOADING)
