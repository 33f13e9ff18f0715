"""Default limits of a step by device: those of vLLM (``EngineArgs.get_batch_defaults``, 0.32), except on CPUs.

A GPU with much memory is also fast, so it needs more tokens in a step to be used well. An exception is the A100 of
80 GB, which is slower with the larger limits (vLLM's pull request 17885).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_GIB: Final = 1024**3

#: Memory in bytes from which a GPU gets the larger limits, and the largest ones.
_LARGE: Final = 70 * _GIB
_LARGEST: Final = 160 * _GIB


@dataclass(frozen=True)
class BatchLimits:
    """Limits of one step.

    Attributes:
        max_num_seqs: maximum number of sequences.
        max_num_batched_tokens: maximum number of tokens, over all sequences.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


def default_batch_limits(memory_bytes: int, name: str, *, on_cpu: bool, unbounded_prompts: bool) -> BatchLimits:
    """Return the limits of an engine whose arguments state none.

    Args:
        memory_bytes: memory of one device; 0 if it is not known.
        name: name of the device, as its driver reports it, or its key in the accelerator catalogue.
        unbounded_prompts: whether prompts may fill a step while other requests decode
            (``--long-prefill-token-threshold=0``, as offline): throughput then matters more than latency.
    """
    if on_cpu:
        return BatchLimits(256, 2048)
    if memory_bytes >= _LARGEST:
        return BatchLimits(1024, 16384)
    if memory_bytes >= _LARGE and "a100" not in name.lower():
        return BatchLimits(1024, 16384 if unbounded_prompts else 8192)
    return BatchLimits(256, 8192 if unbounded_prompts else 2048)
