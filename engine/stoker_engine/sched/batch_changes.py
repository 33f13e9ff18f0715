"""Changes of the runner's batch rows that the next step must carry: see `core.step`.

A row is released immediately, even if its sequence is in a step in flight: the next sequence in that row runs in a
later step, and steps run in order.
"""

from __future__ import annotations

import itertools
from array import array
from typing import Any

from stoker_engine.core.request import NO_ROW, Sequence
from stoker_engine.core.step import Fork, NewSequence


class BatchChanges:
    """Allocates rows, and collects their changes from step to step.

    Args:
        num_rows: maximum number of running sequences.
        tells_sampled: whether steps carry sampled tokens to the runner. If not, the runner writes them itself.
    """

    def __init__(self, num_rows: int, tells_sampled: bool = False) -> None:
        self._tells_sampled = tells_sampled
        self._known: dict[int, list[int]] = {}  # by row: flat (row, position, token) of newly sampled tokens
        self._free = list(reversed(range(num_rows)))
        self._started: dict[int, Sequence] = {}
        self._forks: list[Fork] = []
        self._written: list[tuple[int, int, list[int]]] = []

    def begin(self, sequence: Sequence) -> None:
        """Allocate a row for a sequence; the next step carries all of the sequence."""
        sequence.row = self._free.pop()
        self._started[sequence.row] = sequence

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Allocate a row for `child` that starts as a copy of the computed tokens in `parent`'s row."""
        child.row = self._free.pop()
        num_blocks = [len(table) for table in child.blocks]
        self._forks.append(Fork(child.row, parent.row, child.index, child.num_computed, num_blocks))

    def write(self, sequence: Sequence) -> None:
        """Send the last token of `sequence`, which the runner did not write itself, if the sequence has a row."""
        if sequence.row != NO_ROW:
            self._written.append((sequence.row, len(sequence.token_ids) - 1, sequence.token_ids[-1:]))

    def sampled(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the last `num_tokens` (at least one) tokens of `sequence` were sampled."""
        if self._tells_sampled and sequence.row != NO_ROW:
            entries = self._known.setdefault(sequence.row, [])
            for position in range(len(sequence.token_ids) - num_tokens, len(sequence.token_ids)):
                entries += (sequence.row, position, sequence.token_ids[position])

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's row, if it has one, and drop the row's pending changes."""
        row = sequence.row
        if row == NO_ROW:
            return
        self._started.pop(row, None)
        self._known.pop(row, None)
        self._forks = [fork for fork in self._forks if fork.row != row]
        self._written = [written for written in self._written if written[0] != row]
        self._free.append(row)
        sequence.row = NO_ROW

    def pop(self) -> dict[str, Any]:
        """Return the fields of `core.step.Step` that describe the changes since the last call."""
        changes = {
            "forks": self._forks,
            "new": [_new(row, sequence) for row, sequence in self._started.items()],
            "written": self._written,
            "known": array("i", itertools.chain.from_iterable(self._known.values())),
        }
        self._started, self._forks, self._written, self._known = {}, [], [], {}
        return changes

    def check(self, running: list[Sequence]) -> None:
        """Assert that each running sequence has a row of its own."""
        rows = [sequence.row for sequence in running]
        assert NO_ROW not in rows and len(set(rows)) == len(rows)
        assert set(rows).isdisjoint(self._free)


def _new(row: int, sequence: Sequence) -> NewSequence:
    request = sequence.request
    return NewSequence(
        row=row,
        spec=request.spec,
        index=sequence.index,
        output_token_ids=sequence.output_token_ids,
        blocks=[list(table) for table in sequence.blocks],
        num_candidates=request.beams.num_candidates if request.beams else 0,
        num_prompt_logprobs=len(request.prompt_logprobs),
        adapter_slot=sequence.adapter_slot,
    )
