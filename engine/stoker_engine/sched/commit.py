"""Applies the result of a step to its sequences."""

from __future__ import annotations

import itertools
import logging
from typing import Final

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.outputs import TokenDelta
from stoker_engine.core.request import NO_ROW, Request, Sequence
from stoker_engine.core.step import Sampled, StepResult
from stoker_engine.sched.accept_draft import accept_draft
from stoker_engine.sched.scheduled import Scheduled
from stoker_engine.sched.sequence_queues import SequenceQueues

logger = logging.getLogger(__name__)

#: Error of a request whose logits are NaN or infinite.
CORRUPTED: Final = (
    "the model computed NaN or infinite logits for this request; causes are damaged weights, or float16 for a "
    "model that needs the range of bfloat16 or float32"
)


def commit(queues: SequenceQueues, scheduled: Scheduled, result: StepResult) -> list[TokenDelta]:
    """Apply the result of the oldest step in flight: mark its tokens as computed, and append sampled tokens.

    Returns:
        New tokens and ends of sequences. Ended sequences have been removed and their blocks freed.
    """
    step = scheduled.step
    deltas = _fail_corrupted(queues, scheduled, result) if result.is_corrupted else []
    queues.kv.prefix_cache.computed(step.number)
    searching: dict[Request, None] = {}
    drafts = {draft.batch_index: len(draft.token_ids) for draft in step.drafts}
    sampled = iter(result.sampled)
    shares = zip(scheduled.sequences, scheduled.epochs, step.starts, step.lengths, step.num_samples, strict=True)
    for batch_index, (sequence, epoch, start, length, num_samples) in enumerate(shares):
        drawn = next(sampled) if num_samples else None
        if sequence.epoch != epoch:
            continue
        sequence.num_computed = start + length
        if result.prompt_logprobs:
            sequence.request.prompt_logprobs += result.prompt_logprobs.get(batch_index) or []
        if drawn is None:
            continue
        if drawn.error is not None:
            logger.error("request %s: %s", sequence.request.id, drawn.error, extra=sequence.request.spec.log_fields)
            deltas += fail(queues, sequence.request, drawn.error)
            continue
        if sequence.request.beams is not None:
            sequence.candidates = drawn.candidates
            searching[sequence.request] = None
            continue
        if batch_index in drafts:
            accept_draft(sequence, drafts[batch_index], drawn)
        deltas += _append_sampled(queues, sequence, drawn)
        if batch_index in drafts and sequence.finish_reason is None:
            queues.kv.trim(sequence)
    for request in searching:
        if request.live and all(beam.candidates is not None for beam in request.live):
            deltas += _advance_beams(queues, request)
    return deltas


def _append_sampled(queues: SequenceQueues, sequence: Sequence, drawn: Sampled) -> list[TokenDelta]:
    """Append new tokens to `sequence`, which is the first child. If there are several, the others fork from it."""
    sequence.num_inflight_tokens -= 1
    sequence.is_blocked = False
    children = drawn.token_ids
    if len(children) == 1:
        return [_grow(queues, sequence, children[0], drawn.logprobs[0] if drawn.logprobs else None)]
    sequence.request.num_forking = 0
    family = [sequence, *(queues.fork(sequence) for _ in children[1:])]
    deltas = []
    for index, (member, token_ids) in enumerate(zip(family, children, strict=True)):
        logprobs = drawn.logprobs[index] if drawn.logprobs else None
        deltas.append(_grow(queues, member, token_ids, logprobs, forked=member is not sequence))
        if member is not sequence:
            queues.rows.write(member)
    return deltas


def _grow(
    queues: SequenceQueues,
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    *,
    forked: bool = False,
) -> TokenDelta:
    """Append new tokens, up to the one that ends the sequence.

    Args:
        forked: whether the sequence has just been forked; the caller then sends the token to its row.
    """
    request = sequence.request
    is_first = sequence.index == 0 and len(sequence.token_ids) == request.num_prompt_tokens
    for count, token_id in enumerate(token_ids, 1):
        sequence.append(token_id)
        if sequence.finish_reason is not None and count < len(token_ids):
            token_ids = token_ids[:count]
            logprobs = None if logprobs is None else logprobs[:count]
            break
    if not forked:
        queues.rows.sampled(sequence, len(token_ids))
    queues.kv.computed(sequence)
    if sequence.finish_reason is not None:
        queues.end(sequence, sequence.finish_reason)
    return TokenDelta(
        request.id,
        sequence.index,
        token_ids,
        sequence.finish_reason,
        sequence.stop_reason,
        logprobs,
        request.prompt_logprobs if is_first and request.wants_prompt_logprobs else None,
        num_cached_tokens=request.num_cached or 0,
    )


def _fail_corrupted(queues: SequenceQueues, scheduled: Scheduled, result: StepResult) -> list[TokenDelta]:
    """End requests with NaN or infinite logits. Their blocks are removed from the prefix cache, and sequences that
    share blocks computed by this step or a later one in flight are requeued."""
    corrupted: dict[Request, None] = {}
    sampled = iter(result.sampled)
    shares = zip(scheduled.sequences, scheduled.epochs, scheduled.step.num_samples, strict=True)
    for batch_index, (sequence, epoch, num_samples) in enumerate(shares):
        drawn = next(sampled) if num_samples else None
        is_corrupted = result.prompt_logprobs.get(batch_index, ()) is None or (drawn is not None and drawn.is_corrupted)
        if is_corrupted and sequence.epoch == epoch:
            corrupted[sequence.request] = None
    wrong = {block for request in corrupted for s in request.live for block in queues.kv.forget(s)}
    deltas = []
    for request in corrupted:
        logger.error("request %s: %s", request.id, CORRUPTED, extra=request.spec.log_fields)
        queues.num_corrupted += 1
        deltas += fail(queues, request, CORRUPTED)
    # Sequences that ended meanwhile may be corrupted too, or have shared corrupted blocks.
    cache = queues.kv.prefix_cache
    wrong |= cache.forget_pending(lambda owner: isinstance(owner, Sequence) and owner.row == NO_ROW)
    while sharers := [s for s in queues.running if not wrong.isdisjoint(itertools.chain.from_iterable(s.blocks))]:
        for sequence in sharers:
            queues.requeue(sequence)
        wrong = cache.forget_pending(sharers.__contains__)
    return deltas


def fail(queues: SequenceQueues, request: Request, error: str) -> list[TokenDelta]:
    """End a request with an error. Returns one delta for each of its sequences that have not ended."""
    unfinished = [sequence.index for sequence in request.live]
    if request.beams is not None:
        unfinished = list(range(request.spec.num_sequences))
    else:
        unfinished += range(request.num_started, request.spec.num_sequences)
    queues.finish(request.id, FinishReason.ERROR)
    return [TokenDelta(request.id, index, [], FinishReason.ERROR, error=error) for index in unfinished]


def _advance_beams(queues: SequenceQueues, request: Request) -> list[TokenDelta]:
    """Select the best candidates of all beams of a search, and fork their parents into the next beams. Returns the
    finished beams if the search is over, else no deltas."""
    assert request.beams is not None
    beams = request.live
    outputs = [beam.output_token_ids for beam in beams]
    following = request.beams.advance([beam.candidates or [] for beam in beams], outputs)
    known = [list(beam.token_ids) for beam in beams]
    heirs: dict[int, Sequence] = {}  # a parent's first child reuses its sequence
    children = []
    for following_beam in following:
        parent = beams[following_beam.parent]
        child = queues.fork(parent) if following_beam.parent in heirs else parent
        heirs.setdefault(following_beam.parent, child)
        children.append(child)
    for child, following_beam in zip(children, following, strict=True):
        child.token_ids = [*known[following_beam.parent], following_beam.token_id]
        queues.rows.write(child)
    for beam in beams:
        beam.candidates = None
        if beam in queues.blocked_beams and beam in children:
            queues.blocked_beams.remove(beam)
            queues.waiting.add(beam)
    if not following:
        deltas = [
            TokenDelta(
                request_id=request.id,
                index=index,
                token_ids=beam.token_ids,
                finish_reason=FinishReason.STOP if beam.ended else FinishReason.LENGTH,
                stop_reason=beam.token_ids[-1] if beam.ended else None,
                cumulative_logprob=beam.cumulative_logprob,
                num_cached_tokens=request.num_cached or 0,
            )
            for index, beam in enumerate(request.beams.finished)
        ]
        queues.finish(request.id, deltas[0].finish_reason or FinishReason.STOP)
        return deltas
    for beam in [beam for beam in beams if beam not in children]:
        queues.end(beam, FinishReason.STOP)
    request.live = children
    return []
