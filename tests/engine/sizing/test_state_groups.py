"""Layers with one state per sequence: sizes of published models, and no effect on other layers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from stoker_engine.architectures.cache_spec import CacheSpec, LayerCache, StateSpec, StateTensor
from stoker_engine.architectures.decoder_config import LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.cache_groups import blocks_for_beams, blocks_per_sequence, cache_groups, usable_blocks
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import (
    GIB,
    Device,
    Numbers,
    kv_block_bytes,
    longest_sequence,
    memory_use,
    model_cache_groups,
    stage_block_bytes,
)
from stoker_engine.sizing.pipeline_stages import pipeline_stages
from stoker_engine.sizing.state_layout import state_layout
from stoker_engine.sizing.weight_sizes import Sharding

from ...support.engine.random_states import random_state
from .test_memory import LLAMA

BF16 = kv_format("auto", "bfloat16")
KIB = 1024

#: Mamba-2 2.7B: 64 layers of d_inner 5120, 80 heads of 64, state 128, 1 group, kernel 4.
MAMBA_2 = StateSpec((StateTensor("conv", (3, 5120 + 2 * 128)), StateTensor("ssm", (80, 64, 128), "float32")))
#: Jamba 1.5 Mini: of 32 layers every eighth is attention; the others are Mamba of d_inner 8192, state 16, kernel 4.
JAMBA_STATE = StateSpec((StateTensor("conv", (3, 8192)), StateTensor("ssm", (8192, 16), "float32")))
JAMBA_ATTENTION = CacheSpec(8, 128, 128)
JAMBA = [JAMBA_ATTENTION if layer % 8 == 4 else JAMBA_STATE for layer in range(32)]
#: Qwen3-Next 80B-A3B: of 48 layers every fourth is attention with 2 KV heads of 256; the others are gated DeltaNet with
#: 16 key and 32 value heads of 128, kernel 4.
NEXT_STATE = StateSpec(
    (StateTensor("conv", (3, 2 * 16 * 128 + 32 * 128)), StateTensor("matrix", (32, 128, 128), "float32"))
)
NEXT = [CacheSpec(2, 256, 256) if layer % 4 == 3 else NEXT_STATE for layer in range(48)]


def test_models_with_states_alone_hold_one_block_per_layer() -> None:
    groups = cache_groups([MAMBA_2] * 64, 16, BF16)
    state = 3 * 5376 * 2 + 80 * 64 * 128 * 4
    assert state == 32_256 + 2_621_440
    [group] = groups
    assert (group.kind, group.layers, group.state_bytes) == ("state", tuple(range(64)), 64 * state)
    assert kv_block_bytes(groups, 16) == state and group.blocks_per_sequence == 64
    assert {blocks_per_sequence(groups, length, 2048, 16) for length in (1, 16, 17, 1_000_000)} == {64}
    assert [longest_sequence(groups, blocks, 2048, 16, 8192) for blocks in (63, 64)] == [0, 8192]


@pytest.mark.parametrize(
    ("specs", "block", "state", "per_sequence"),
    [
        # 4 attention layers × 2 × 8 heads × 128 × 2 bytes × 16 tokens; 28 × (48 KiB + 512 KiB) of states.
        (JAMBA, 256 * KIB, 28 * 560 * KIB, 62),
        # 12 × 2 × 2 heads × 256 × 2 bytes × 16 tokens; 36 × (48 KiB + 2 MiB).
        (NEXT, 384 * KIB, 36 * 2096 * KIB, 197),
    ],
)
def test_hybrids_have_their_published_sizes(specs: list[LayerCache], block: int, state: int, per_sequence: int) -> None:
    groups = cache_groups(specs, 16, BF16)
    assert [group.kind for group in groups] == ["tokens", "state"]
    assert kv_block_bytes(groups, 16) == block
    assert (groups[1].state_bytes, groups[1].blocks_per_sequence) == (state, per_sequence)
    assert per_sequence == math.ceil(state / block)
    for length in (1, 16, 17, 4096):
        assert blocks_per_sequence(groups, length, 2048, 16) == math.ceil(length / 16) + per_sequence
    # A pool with one block less holds a sequence with one block's tokens less.
    assert longest_sequence(groups, per_sequence + 256, 2048, 16, 100_000) == 4096
    assert longest_sequence(groups, per_sequence, 2048, 16, 100_000) == 0


def test_beams_share_prompt_blocks_but_no_state() -> None:
    alone, with_states = cache_groups([JAMBA_ATTENTION] * 4, 16, BF16), cache_groups(JAMBA, 16, BF16)
    for width in (1, 2, 5):
        without, needed = (blocks_for_beams(each, 160, 176, 2048, 16, width) for each in (alone, with_states))
        assert needed - without == width * 62


def test_only_states_with_a_shard_dim_are_sharded() -> None:
    state = StateSpec((StateTensor("bc", (3, 256)), StateTensor("ssm", (80, 64, 128), "float32", shard_dim=0)))
    config = hybrid(layers=2, every=1, state=state)
    for tensor in (1, 2, 8):
        [group] = model_cache_groups(config, 16, BF16, tensor)
        assert group.state_bytes == 2 * (3 * 256 * 2 + 80 // tensor * 64 * 128 * 4)


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_stage_fits_its_part_of_a_block_table(every: int, stages: int) -> None:
    """All stages use the same tables: a stage's part of a state must take as many blocks as the whole model's."""
    config = hybrid(layers=8, every=every, state=JAMBA_STATE)
    numbers = Numbers(2, BF16, 16, 2048, 256)
    [whole] = [group for group in model_cache_groups(config, 16, BF16) if group.kind == "state"]
    [one] = stage_block_bytes(config, numbers, Sharding())
    assert one == kv_block_bytes(model_cache_groups(config, 16, BF16), 16)
    blocks = stage_block_bytes(config, numbers, Sharding(pipeline=stages))
    for block, layers in zip(blocks, pipeline_stages(8, stages), strict=True):
        states = sum(layer in whole.layers for layer in layers) * 560 * KIB
        tokens = sum(layer not in whole.layers for layer in layers) * 2 * 8 * 128 * 2 * 16
        assert block == max(tokens, -(-states // whole.blocks_per_sequence // 16) * 16)
    use = memory_use(config, numbers, Device(80 * GIB, 0.9, on_cpu=False, sharding=Sharding(pipeline=stages)))
    assert use.usable_blocks == usable_blocks(use.num_blocks) > whole.blocks_per_sequence


@pytest.mark.parametrize("seed", range(200))
def test_state_tensors_fill_their_blocks_without_overlap(seed: int) -> None:
    rng = random.Random(seed)
    element = rng.choice([2, 4])
    kv = kv_format("auto", {2: "bfloat16", 4: "float32"}[element])
    specs = random_specs(rng)
    block_size = rng.choice([1, 3, 16])
    groups = cache_groups(specs, block_size, kv)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
    assert all(specs[layer].kind == group.kind for group in groups for layer in group.layers)
    tokens = [spec for spec in specs if spec.kind == "tokens"]
    states = [spec for spec in specs if spec.kind == "state"]
    # Layers that store tokens are grouped as if there were no others.
    assert [g.bytes_per_token for g in groups if g.kind == "tokens"] == [
        g.bytes_per_token for g in (cache_groups(tokens, block_size, kv) if tokens else ())
    ]
    block = kv_block_bytes(groups, block_size)
    if not states:
        return
    group = groups[-1]
    taken: set[tuple[int, int]] = set()
    total = 0
    for spec, offsets in zip(states, state_layout(states, element, block), strict=True):
        for tensor in spec.tensors:
            item = {None: element, "float32": 4, "bfloat16": 2, "float16": 2}[tensor.dtype]
            size = math.prod(tensor.shape) * item
            byte_positions = [(p.index, byte) for p in offsets[tensor.name] for byte in range(p.start, p.stop)]
            assert len(byte_positions) == size
            assert taken.isdisjoint(byte_positions)
            assert all(0 <= index < group.blocks_per_sequence and 0 <= byte < block for index, byte in byte_positions)
            assert all(p.start % item == p.stop % item == 0 for p in offsets[tensor.name]), "an element is cut"
            taken.update(byte_positions)
            total += -(-size // 16) * 16
    assert group.state_bytes == total
    assert (group.blocks_per_sequence - 1) * block < total <= group.blocks_per_sequence * block


def random_specs(rng: random.Random) -> list[LayerCache]:
    """Return some layers of up to four kinds, in any order."""
    kinds: list[LayerCache] = [
        CacheSpec(rng.randint(1, 3), rng.choice([4, 5, 8]), rng.choice([4, 8])),
        CacheSpec(rng.randint(1, 3), 8, 8, sliding_window=rng.choice([4, 64])),
        CacheSpec(1, 12, 8, latent=True),
        random_state(rng),
        random_state(rng),
    ]
    chosen = rng.sample(kinds, rng.randint(1, 4))
    return [rng.choice(chosen) for _ in range(rng.randint(1, 12))]


@dataclass(frozen=True)
class Recurrent(LayerConfig):
    """A layer with a state instead of keys and values."""

    state: StateSpec = MAMBA_2

    @property
    def cache(self) -> LayerCache:
        """Return its state."""
        return self.state


def hybrid(layers: int, every: int, state: StateSpec) -> ModelConfig:
    """Return a Llama in which one of `every` layers keeps `state`."""
    config = ModelConfig.from_dict({**LLAMA, "num_hidden_layers": layers})
    made: list[LayerConfig] = []
    for index, layer in enumerate(config.layers):
        own = replace(layer.attention)
        recurrent = index % every == 0
        made.append(Recurrent(own, layer.mlp, state=state) if recurrent else replace(layer, attention=own))
    return replace(config, decoder=replace(config.decoder, layers=tuple(made)))
