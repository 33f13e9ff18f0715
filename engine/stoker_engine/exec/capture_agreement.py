"""Ranks that share a model capture the same CUDA graphs, or none.

NCCL requires that an operation is captured on all ranks of a group or on none, and that these ranks replay graphs that
were captured together. A rank without a graph would wait for the others in its first step. So ranks vote, on their
hosts, before the first capture and after each one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker_engine.parallel.communicator import Communicator

#: Captures a computation. Returns its result at a fixed address, and a function that replays it.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]


class CaptureError(Exception):
    """A computation was not captured, on this rank or on another one."""


def all_agree(ranks: Communicator, yes: bool) -> bool:
    """Return whether `yes` is true on all ranks."""
    return ranks.size == 1 or bool(ranks.all_gather(torch.tensor([yes])).all())


def agreed(capture: Capture, ranks: Communicator) -> Capture:
    """Make a capture fail on all ranks if it fails on one.

    A capture does not execute the operations between ranks, so a rank whose capture failed has left none out. The run
    before it does: another error there, such as a lack of memory, ends this rank, since the others wait for it.

    Returns:
        A `Capture` that raises `CaptureError`.
    """

    def captured(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        try:
            found, error = capture(compute), None
        except CaptureError as raised:
            found, error = None, raised
        if not all_agree(ranks, error is None) or found is None:
            reason = "another rank could not capture one" if error is None else str(error).partition("\n")[0]
            raise CaptureError(reason) from error
        return found

    return captured
