"""Preemption by recompute: when blocks run out, the last running sequence in queue order loses its blocks and waits.

The pool can hold any single sequence, so some sequence always progresses. No sequence is preempted while a step is in
flight: the step may end a sequence and thereby free blocks.
"""

from __future__ import annotations

from stoker_engine.core.request import Sequence
from stoker_engine.sched.sequence_queues import SequenceQueues


def make_room(queues: SequenceQueues, sequence: Sequence, num_tokens: int, step: int) -> bool:
    """Preempt sequences from the end of the queue order until `step` can compute `num_tokens` more of `sequence`, and
    allocate the blocks for these tokens. False: `sequence` itself was the last and has been preempted.
    """
    while preempt_last(queues) is not sequence:
        if queues.kv.allocate(sequence, num_tokens, step):
            return True
    return False


def preempt_last(queues: SequenceQueues) -> Sequence:
    """Preempt the last running sequence in queue order, and return it."""
    victim = queues.running[-1]
    queues.requeue(victim)
    victim.num_preemptions += 1
    victim.request.num_preemptions += 1
    queues.num_preemptions += 1
    return victim
