"""Groups of layers whose KV cache shares one pool of blocks.

The layers of a *group* keep the same tokens (same window) and share a block table. Each block belongs to one group at a
time and holds `block_size` tokens of all the group's layers, so other groups can reuse blocks that a window has left.
For this all blocks have the same size, and groups have the same number of layers as far as possible:

    Gemma 3, 18 layers:   W W W W W F  W W W W W F  W W W W W F      W window, F full
    groups of 3:          F F F │ W W W │ W W W │ W W W │ W W W │ W W W

For each group, a sequence holds one block for every `block_size` tokens that the layers can still attend to (as in
vLLM's hybrid KV cache manager).

Layers that keep one *state* for each sequence (`StateSpec`) form another group, of kind "state". Its table always has
`blocks_per_sequence` blocks, whatever the length of the sequence:

    Jamba: 4 attention layers, 28 of Mamba      tokens │ 7 │ 3 │ …      a block for every 16 tokens
                                                state  │ 5 │ 9 │ 2 │ 4 │      a fixed number

Every step overwrites the state, so its blocks are never in the prefix cache. Cached attention blocks are useless
without the state at their end, so models with states have no prefix hits. Forked sequences share a state's blocks until
one of these sequences computes, which requires a copy of all the state's blocks.

Block 0 is the *null block* (as in vLLM). It belongs to no sequence and fills the entries of block tables without a
block: those that a window has left, and those past the end of a sequence. Its contents never affect a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from stoker_engine.architectures.cache_spec import LayerCache
from stoker_engine.sizing.kv_format import KVFormat
from stoker_engine.sizing.state_layout import aligned, state_bytes

#: Index of the block that is never allocated and fills empty entries of block tables.
NULL_BLOCK: Final = 0


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables.

    Attributes:
        sliding_window: window of the layers in tokens; None for full attention and for the kind "state".
        layers: indices of the layers, ascending.
        bytes_per_token: bytes of one token in all layers of the group; 0 for the kind "state".
        kind: whether the layers keep data of each token or one state for each sequence.
        state_bytes: bytes of one sequence's state in all layers of the group; 0 for the kind "tokens".
        blocks_per_sequence: fixed number of blocks of a sequence for the kind "state"; 0 for the kind "tokens".
    """

    sliding_window: int | None
    layers: tuple[int, ...]
    bytes_per_token: int
    kind: Literal["tokens", "state"] = "tokens"
    state_bytes: int = 0
    blocks_per_sequence: int = 0


def cache_groups(specs: Sequence[LayerCache], block_size: int, kv: KVFormat) -> tuple[CacheGroup, ...]:
    """Return the groups of a model: full attention first, then windows in ascending order, states last.

    Args:
        specs: cache spec of each layer.
        block_size: tokens in one block.
        kv: storage format of the cache.
    """
    groups = _token_groups(specs, kv)
    states = {layer: spec for layer, spec in enumerate(specs) if spec.kind == "state"}
    if states:
        sizes = [state_bytes(spec, kv.state_bytes) for spec in states.values()]
        # Without attention layers, a block is as large as the largest layer's state.
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
    # If the counts are similar, a second group of the more frequent kind would be almost empty.
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups = []
    for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0)):
        for start in range(0, len(layers), size):
            members = tuple(layers[start : start + size])
            groups.append(CacheGroup(window, members, sum(sizes[layer] for layer in members)))
    return groups


def bytes_per_position(groups: Sequence[CacheGroup]) -> int:
    """Return the bytes of one token's slot in a block: the maximum over all groups."""
    return max((group.bytes_per_token for group in groups), default=0)


def usable_blocks(num_blocks: int) -> int:
    """Return the number of blocks that sequences can use: all but the null block."""
    return max(num_blocks - 1, 0)


def blocks_per_sequence(groups: Sequence[CacheGroup], num_tokens: int, step_tokens: int, block_size: int) -> int:
    """Return the maximum number of blocks that a sequence of `num_tokens` holds at once, with at most `step_tokens`
    tokens in a step."""
    total = 0
    for group in groups:
        if group.kind == "state":
            total += group.blocks_per_sequence
            continue
        seen = num_tokens
        if group.sliding_window is not None:
            # The window before the step's first token, the step's tokens, and one block if they are not block-aligned.
            seen = min(num_tokens, group.sliding_window - 1 + step_tokens + block_size)
        total += -(-seen // block_size)
    return total


def blocks_for_beams(
    groups: Sequence[CacheGroup], num_prompt: int, num_tokens: int, step_tokens: int, block_size: int, width: int
) -> int:
    """Return the maximum number of blocks that `width` beams hold at once, each of `num_tokens` tokens including the
    prompt of `num_prompt` tokens.

    Beams share the prompt's full blocks in groups with full attention. Each beam has its own state. After a preemption
    one beam may compute many tokens in a step; the others compute one.
    """
    tokens = [group for group in groups if group.kind == "tokens"]
    shared = num_prompt // block_size * sum(group.sliding_window is None for group in tokens)
    states = sum(group.blocks_per_sequence for group in groups)
    one = blocks_per_sequence(groups, num_tokens, step_tokens, block_size)
    other = blocks_per_sequence(tokens, num_tokens, 1, block_size) + len(tokens)  # while a shared block is copied
    return one + (width - 1) * (states + max(other - shared, len(tokens)))
