"""How the KV cache of a model's layers is cut into blocks that all layers share one pool of.

Layers that keep the same tokens (same window) go by one block table: a *group*. Each block belongs to one group at a
time and holds `block_size` tokens of all its layers, so a window's old blocks can serve other layers next. For that,
blocks have one size, and layers of one kind are split into groups of about equal size:

    Gemma 3, 18 layers:   W W W W W F  W W W W W F  W W W W W F      W window, F full
    groups of 3:          F F F │ W W W │ W W W │ W W W │ W W W │ W W W

A sequence then holds, for each group, one block for every `block_size` tokens that its layers still see.
(The idea is vLLM's hybrid KV cache manager.)

Layers that keep one *state* of a sequence (`StateSpec`) are one more group, of kind "state". Its table has
`blocks_per_sequence` blocks from the sequence's admission to its end, however long it gets:

    Jamba: 4 attention layers, 28 of Mamba      tokens │ 7 │ 3 │ …      a block for every 16 tokens
                                                state  │ 5 │ 9 │ 2 │ 4 │      always as many

Every step overwrites a state, so its blocks are never in the prefix cache, and a prefix that attention layers still
have is of no use without the state at its end: a model with states has no prefix hits. Sequences that fork may share
a state's blocks until one of them computes, which then needs a copy of all of them.

Block 0 is the *null block* (vLLM's term): it belongs to no sequence, and entries of block tables that have no block
name it: those that a window has left, and those past a sequence's end. What it holds never reaches a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from stoker_engine.architectures.cache_spec import LayerCache
from stoker_engine.sizing.kv_format import KVFormat
from stoker_engine.sizing.state_layout import aligned, state_bytes

#: The block that is never handed out; empty entries of block tables name it.
NULL_BLOCK: Final = 0


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables.

    Attributes:
        sliding_window: tokens that its layers see back; None sees all, and where the kind is "state".
        layers: indices of the layers, in order.
        bytes_per_token: what one token takes in all of them; 0 where the kind is "state".
        kind: whether they keep something of each token, or one state of each sequence.
        state_bytes: of one sequence in all of them; 0 where the kind is "tokens".
        blocks_per_sequence: entries of a sequence's table where the kind is "state"; else 0, and they follow from its
            length.
    """

    sliding_window: int | None
    layers: tuple[int, ...]
    bytes_per_token: int
    kind: Literal["tokens", "state"] = "tokens"
    state_bytes: int = 0
    blocks_per_sequence: int = 0


def cache_groups(specs: Sequence[LayerCache], block_size: int, kv: KVFormat) -> tuple[CacheGroup, ...]:
    """The groups of a model whose layers have `specs`: those that see everything come first, states last.

    Args:
        block_size: tokens of one block.
        kv: how the cache stores numbers.
    """
    groups = _token_groups(specs, kv)
    states = {layer: spec for layer, spec in enumerate(specs) if spec.kind == "state"}
    if states:
        sizes = [state_bytes(spec, kv.state_bytes) for spec in states.values()]
        # Where there are no blocks of tokens, a block is as large as a layer's state.
        block = aligned(bytes_per_position(groups) * block_size) or max(sizes)
        count = -(-sum(sizes) // block)
        groups.append(CacheGroup(None, tuple(states), 0, "state", sum(sizes), count))
    return tuple(groups)


def _token_groups(specs: Sequence[LayerCache], kv: KVFormat) -> list[CacheGroup]:
    sizes: dict[int, int] = {}
    kinds: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec.kind == "tokens":
            sizes[layer] = kv.token_bytes(spec)
            kinds.setdefault(spec.sliding_window, []).append(layer)
    if not kinds:
        return []
    counts = [len(layers) for layers in kinds.values()]
    # A few more layers of one kind than of another are not worth a second group: it would be almost empty.
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups = []
    for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0)):
        for start in range(0, len(layers), size):
            members = tuple(layers[start : start + size])
            groups.append(CacheGroup(window, members, sum(sizes[layer] for layer in members)))
    return groups


def bytes_per_position(groups: Sequence[CacheGroup]) -> int:
    """What one token's place in a block has room for: what it takes in the largest group."""
    return max((group.bytes_per_token for group in groups), default=0)


def usable_blocks(num_blocks: int) -> int:
    """How many of a cache's blocks sequences can hold: all but the null block."""
    return max(num_blocks - 1, 0)


def blocks_per_sequence(groups: Sequence[CacheGroup], num_tokens: int, step_tokens: int, block_size: int) -> int:
    """The most blocks that one sequence of `num_tokens` holds at once, computed `step_tokens` at a time."""
    total = 0
    for group in groups:
        if group.kind == "state":
            total += group.blocks_per_sequence
            continue
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

    They share the prompt's full blocks in the groups that see everything; each has a state of its own. One of them may
    be computing many tokens at once, after a preemption; the others take a token a step.
    """
    tokens = [group for group in groups if group.kind == "tokens"]
    shared = num_prompt // block_size * sum(group.sliding_window is None for group in tokens)
    states = sum(group.blocks_per_sequence for group in groups)
    one = blocks_per_sequence(groups, num_tokens, step_tokens, block_size)
    other = blocks_per_sequence(tokens, num_tokens, 1, block_size) + len(tokens)  # while a shared block is copied
    return one + (width - 1) * (states + max(other - shared, len(tokens)))
