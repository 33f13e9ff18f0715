"""How the KV cache of a model's layers is cut into blocks that all layers share one pool of.

Layers that keep the same tokens (same window) go by one block table: a *group*. Each block belongs to one group at a
time and holds `block_size` tokens of all its layers, so a window's old blocks can serve other layers next. For that,
blocks have one size, and layers of one kind are split into groups of about equal size:

    Gemma 3, 18 layers:   W W W W W F  W W W W W F  W W W W W F      W window, F full
    groups of 3:          F F F │ W W W │ W W W │ W W W │ W W W │ W W W

A sequence then holds, for each group, one block for every `block_size` tokens that its layers still see.
(The idea is vLLM's hybrid KV cache manager.)

Block 0 is the *null block* (vLLM's term): it belongs to nobody, and entries of block tables that have no block name it:
those that a window has left, and those past a sequence's end. What it holds never reaches a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stoker_engine.architectures.cache_spec import CacheSpec

#: The block that is handed out to nobody; empty entries of block tables name it.
NULL_BLOCK: Final = 0


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables.

    Attributes:
        layers: indices of the layers, in order.
        numbers_per_token: how many numbers one token takes in all of them.
    """

    sliding_window: int | None
    layers: tuple[int, ...]
    numbers_per_token: int


def cache_groups(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """The groups of a model whose layers have `specs`; those that see everything come first."""
    kinds: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec.sliding_window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    # A few more layers of one kind than of another are not worth a second group: it would be almost empty.
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups = []
    for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0)):
        for start in range(0, len(layers), size):
            members = tuple(layers[start : start + size])
            groups.append(CacheGroup(window, members, sum(specs[layer].numbers_per_token for layer in members)))
    return tuple(groups)


def numbers_per_slot(groups: Sequence[CacheGroup]) -> int:
    """Numbers that one token's place in a block has room for: those of the largest group."""
    return max(group.numbers_per_token for group in groups)


def usable_blocks(num_blocks: int) -> int:
    """How many of a cache's blocks sequences can hold: all but the null block."""
    return max(num_blocks - 1, 0)


def blocks_per_sequence(groups: Sequence[CacheGroup], num_tokens: int, step_tokens: int, block_size: int) -> int:
    """The most blocks that one sequence of `num_tokens` holds at once, computed `step_tokens` at a time."""
    total = 0
    for group in groups:
        seen = num_tokens
        if group.sliding_window is not None:
            # The window before the step's first token, the step, and one block more where they lie askew.
            seen = min(num_tokens, group.sliding_window - 1 + step_tokens + block_size)
        total += -(-seen // block_size)
    return total


def blocks_for_beams(
    groups: Sequence[CacheGroup], num_prompt: int, num_tokens: int, step_tokens: int, block_size: int, width: int
) -> int:
    """The most blocks that `width` beams hold at once, each of `num_tokens` with the prompt of `num_prompt`.

    They share the prompt's full blocks in the groups that see everything. One of them may be computing many tokens at
    once, after a preemption; the others take a token a step.
    """
    shared = num_prompt // block_size * sum(group.sliding_window is None for group in groups)
    one = blocks_per_sequence(groups, num_tokens, step_tokens, block_size)
    other = blocks_per_sequence(groups, num_tokens, 1, block_size) + len(groups)  # while a shared block is copied
    return one + (width - 1) * max(other - shared, len(groups))
