"""Grouping of layers that share one pool of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.sizing.cache_groups import blocks_for_beams, blocks_per_sequence, bytes_per_position, cache_groups
from stoker_engine.sizing.kv_format import kv_format

BF16 = kv_format("auto", "bfloat16")
FULL = CacheSpec(2, 16, 16)
WINDOW = CacheSpec(2, 16, 16, sliding_window=512)


def test_layers_with_equal_caches_are_one_group() -> None:
    [group] = cache_groups([FULL] * 24, 16, BF16)
    assert group.layers == tuple(range(24))
    assert group.bytes_per_token == 24 * 2 * 2 * 16 * 2


def test_groups_of_gemma_3_have_the_size_of_its_full_layers() -> None:
    specs = [FULL if (layer + 1) % 6 == 0 else WINDOW for layer in range(18)]
    groups = cache_groups(specs, 16, BF16)
    assert [len(group.layers) for group in groups] == [3] * 6
    assert groups[0].layers == (5, 11, 17) and groups[0].sliding_window is None
    assert all(group.sliding_window == 512 for group in groups[1:])


def test_slightly_unequal_kinds_are_not_split() -> None:
    groups = cache_groups([FULL] * 10 + [WINDOW] * 12, 16, BF16)
    assert [len(group.layers) for group in groups] == [10, 12]


def test_latent_vectors_take_no_memory_for_values() -> None:
    assert CacheSpec(1, 576, 512, latent=True).numbers_per_token == 576


@given(
    st.lists(
        st.builds(
            CacheSpec,
            st.integers(1, 4),
            st.sampled_from([8, 16]),
            st.sampled_from([8, 16]),
            st.sampled_from([None, 64, 128]),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_each_layer_is_in_one_group_of_its_own_kind(specs: list[CacheSpec]) -> None:
    groups = cache_groups(specs, 16, BF16)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
    assert all(specs[layer].sliding_window == group.sliding_window for group in groups for layer in group.layers)
    assert bytes_per_position(groups) == max(sum(specs[i].numbers_per_token * 2 for i in g.layers) for g in groups)


def test_long_sequences_hold_few_blocks_for_windows() -> None:
    groups = cache_groups([FULL if (layer + 1) % 6 == 0 else WINDOW for layer in range(18)], 16, BF16)
    full, windows = 32_768 // 16, 5 * -(-(511 + 2048 + 16) // 16)
    assert blocks_per_sequence(groups, 32_768, 2048, 16) == full + windows < 6 * full / 2


def test_beams_share_their_prompt() -> None:
    groups = cache_groups([FULL] * 4, 16, BF16)
    assert blocks_for_beams(groups, 160, 176, 2048, 16, width=1) == 11
    assert blocks_for_beams(groups, 160, 176, 2048, 16, width=4) == 11 + 3 * 2


@pytest.mark.parametrize(
    ("name", "element_bytes", "scale"),
    [
        ("auto", 2, 0),
        ("bfloat16", 2, 0),
        ("fp8", 1, 0),
        ("fp8_e4m3", 1, 0),
        ("fp8_e5m2", 1, 0),
        ("fp8_per_token_head", 1, 4),
        ("int8_per_token_head", 1, 4),
    ],
)
def test_bytes_of_a_token_equal_those_of_vllm(name: str, element_bytes: int, scale: int) -> None:
    """Scales are float32: one for each head's key and value, or one for a latent vector."""
    kv = kv_format(name, "bfloat16")
    assert kv.token_bytes(CacheSpec(8, 128, 128)) == 8 * (256 * element_bytes + 2 * scale)
    assert kv.token_bytes(CacheSpec(1, 576, 512, latent=True)) == 576 * element_bytes + scale
    assert kv.token_bytes(CacheSpec(3, 5, 2)) == 21 * element_bytes + (24 + 3 if scale else 0)  # whole scales
    assert (kv.state_bytes, kv_format(name, "torch.float32").state_bytes) == (2, 4)
    [group] = cache_groups([CacheSpec(8, 128, 128)] * 4, 16, kv)
    assert group.bytes_per_token == 4 * kv.token_bytes(CacheSpec(8, 128, 128))
