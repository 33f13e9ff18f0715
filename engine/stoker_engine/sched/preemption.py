"""Preemption by recompute: when blocks run out, the last in line gives all of its own back and waits.

The first in line is never a victim, and one request fits the pool, so every step makes progress. A sequence with a step
in flight is not preempted: the step may end it, or another one, and then there is room.
"""

from __future__ import annotations

from stoker_engine.core.request import Sequence
from stoker_engine.sched.sequence_queues import SequenceQueues


def make_room(queues: SequenceQueues, sequence: Sequence, num_tokens: int, step: int) -> bool:
    """Preempts sequences from the end of the line until `step` can compute `num_tokens` more of `sequence`, and
    allocates the blocks for them. False: `sequence` was the last in line, and waits.
    """
    while preempt_last(queues) is not sequence:
        if queues.kv.allocate(sequence, num_tokens, step):
            return True
    return False


def preempt_last(queues: SequenceQueues) -> Sequence:
    """Takes the blocks of the last in line. Returns the victim, which waits."""
    victim = queues.running[-1]
    queues.requeue(victim)
    victim.num_preemptions += 1
    victim.request.num_preemptions += 1
    queues.num_preemptions += 1
    return victim
