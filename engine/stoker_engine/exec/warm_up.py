"""Steps that run before the first request, since kernels are compiled at their first launch.

Compiled variants depend on the number and length of sequences only as in `_MORE_TOKENS`, so a few steps are enough.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step import NewSequence, Step

#: Maximum tokens of prompts, except those of `_MORE_TOKENS`.
_LENGTH: Final = 5

#: Token counts just above 16, 32 and 64, where some kernels change the width of their tiles, and above 128, where
#: quantized matrices are dequantized before they are multiplied.
_MORE_TOKENS: Final = (17, 33, 65, 129)

#: Greedy, and random sampling with options.
_PARAMS: Final = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1),
)


def warm_up_steps(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    groups: int,
    adapter_slot: int = NO_ADAPTER,
) -> Iterator[Step]:
    """Yield steps with prompts, with decodes, and with both, as far as the limits allow. Their block tables are empty:
    keys and values go to the null block, whose content affects no request.

    Args:
        max_model_len: maximum number of tokens of a sequence.
        groups: number of groups of layers, each with its own block tables.
        adapter_slot: slot of all sequences; kernels of adapters run even if the slot is empty.
    """
    length = min(_LENGTH, max_model_len, max_num_batched_tokens)
    count = min(3, max_num_seqs, max_num_batched_tokens // length)
    no_blocks: list[list[int]] = [[] for _ in range(groups)]

    def new_sequence(row: int, request: EngineRequest) -> NewSequence:
        return NewSequence(row, request, 0, [], no_blocks, adapter_slot=adapter_slot)

    for params in _PARAMS:
        new = [new_sequence(row, EngineRequest(f"warm-up {row}", [0] * length, params, 2)) for row in range(count)]
        yield _step(new, [(row, 0, length) for row in range(count)], 0)
        if length < max_model_len:
            yield _step([], [(row, length, 1) for row in range(count)], count)
            if count > 1:
                yield _step([new[1]], [(0, length, 1), (1, 0, length)], 1)
    for tokens in _MORE_TOKENS:
        if tokens <= min(max_model_len, max_num_batched_tokens):
            request = EngineRequest("warm-up", [0] * tokens, _PARAMS[0], 1)
            yield _step([new_sequence(0, request)], [(0, 0, tokens)], 0)
        if tokens <= min(max_num_seqs, max_num_batched_tokens):  # as many rows of logits, for a quantized head
            requests = [EngineRequest(f"warm-up {row}", [0], _PARAMS[0], 1) for row in range(tokens)]
            new = [new_sequence(row, request) for row, request in enumerate(requests)]
            yield _step(new, [(row, 0, 1) for row in range(tokens)], tokens)


def _step(new: list[NewSequence], batch: list[tuple[int, int, int]], num_decodes: int) -> Step:
    """Build a step of (row, start, length) entries, decodes first."""
    rows, starts, lengths = (array("i", each) for each in zip(*batch, strict=True))
    samples = array("i", [1] * len(batch))
    return Step(0, rows, starts, lengths, samples, num_decodes, sum(lengths), new=new)
