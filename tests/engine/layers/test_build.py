"""Sharding of a model's parts among ranks: every element once, or every head wherever it is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from stoker_common.errors import ModelError
from stoker_engine.architectures.stored_formats import GGUF_FORMATS
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.quant.blocks import Blocks
from stoker_engine.quant.weight_target import Shard, WeightTarget

SIZES = [1, 2, 3, 5, 31, 32, 33, 64, 96, 97, 128, 1000]
RANKS = [1, 2, 3, 4, 7, 8]


@dataclass
class SilentRank(SingleRank):
    """A rank that never communicates."""

    rank: int
    size: int


def builds(ranks: int) -> list[Build]:
    """Return one build per rank."""
    return [Build(torch.float32, SdpaBackend(), REFERENCE, SilentRank(rank, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("multiple", [1, 8, 32])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("size", SIZES)
def test_shards_cover_every_element_once(size: int, ranks: int, multiple: int) -> None:
    """Shards are consecutive, cut at multiples, the first the largest; or all ranks refuse."""
    units = -(-size // multiple)
    if (ranks - 1) * -(-units // ranks) >= units:
        for build in builds(ranks):
            with pytest.raises(ModelError, match=rf"{size}.*{ranks} ranks.*--tensor-parallel-size"):
                build.share(size, multiple)
        return
    shares = [build.share(size, multiple) for build in builds(ranks)]
    positions = [position for share in shares for position in range(size)[share.positions]]
    assert positions == list(range(size))
    assert all(share.full == size and share.size and share.start % multiple == 0 for share in shares)
    assert shares[0].size == max(share.size for share in shares) == min(size, -(-units // ranks) * multiple)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_query_heads_are_on_the_rank_of_their_kv_head(group: int, kv_heads: int, ranks: int) -> None:
    """A rank's i-th query head attends to its ⌊i / group⌋-th KV head, as in the whole model."""
    heads = group * kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        for build in builds(ranks):
            with pytest.raises(ModelError, match=r"heads.*--tensor-parallel-size"):
                build.heads(heads), build.kv_heads(kv_heads)
        return
    queries = []
    for build in builds(ranks):
        ours, keys = build.heads(heads), build.kv_heads(kv_heads)
        assert ours.size % keys.size == 0
        for index, head in enumerate(range(heads)[ours.positions]):
            assert range(kv_heads)[keys.positions][index // (ours.size // keys.size)] == head // group
            queries.append(head)
    assert queries == list(range(heads))


def test_weight_targets_hold_their_part() -> None:
    whole = torch.arange(7 * 12.0).view(7, 12)
    target = WeightTarget.of(torch.empty(3, 4), Shard(2, 3, 7), Shard(2, 2, 6).times(2))
    assert (target.full_shape, target.shard) == ((7, 12), (slice(2, 5), slice(4, 8)))
    assert torch.equal(target.part_of(whole), whole[2:5, 4:8])
    rotated = target.transpose(0, 1)
    assert (rotated.full_shape, rotated.tensor.shape) == ((12, 7), (4, 3))
    rotated.tensor.copy_(rotated.part_of(whole.T))
    assert torch.equal(target.tensor, whole[2:5, 4:8])
    assert WeightTarget.of(torch.empty(7, 12), Shard.whole(7), Shard.whole(12)).shard is None


@pytest.mark.parametrize(("columns", "ranks", "sizes"), [(40, 2, "1"), (128, 8, "1 or 2 or 4"), (96, 4, "1 or 3")])
def test_cut_within_a_block_is_refused_with_the_possible_sizes(columns: int, ranks: int, sizes: str) -> None:
    """A single rank is always possible, also if rows end within a block."""
    inputs = Shard(0, columns // ranks, columns)
    build = replace(builds(ranks)[0], linear=lambda _: Blocks(GGUF_FORMATS["Q8_0"]))
    with pytest.raises(ModelError, match=rf"blocks of 32 columns.*; choose --tensor-parallel-size {sizes}$"):
        MergedLinear(build, "layer", inputs, {"o": Shard.whole(8)}, bias=False)
