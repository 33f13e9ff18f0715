"""The hash chain over a prompt's text: exactly equal prefixes have equal blocks."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from stoker_common.block_hash import CacheKeys
from stoker_common.text_prefix_hash import BLOCKS_OF_A_SIZE, FIRST_BLOCK, block_ends, text_chain


@given(st.integers(0, 200_000))
def test_blocks_are_full_and_small_relative_to_the_preceding_text(size: int) -> None:
    ends = [0, *block_ends(size)]
    blocks = [end - start for start, end in itertools.pairwise(ends)]
    assert ends[-1] <= size < ends[-1] + FIRST_BLOCK * 2 ** (len(blocks) // BLOCKS_OF_A_SIZE)
    for start, block in zip(ends, blocks, strict=False):
        assert block == FIRST_BLOCK or block <= FIRST_BLOCK + start // BLOCKS_OF_A_SIZE


def test_huge_text_has_few_blocks() -> None:
    assert len(list(block_ends(32 << 20))) < 400


@given(st.integers(0, 40_000), st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 2**32))
def test_texts_share_the_blocks_of_their_common_prefix(common: int, first: int, second: int, seed: int) -> None:
    chance = random.Random(seed)
    beginning = chance.randbytes(common)
    texts = beginning + b"a" + chance.randbytes(first), beginning + b"b" + chance.randbytes(second)
    chains = [text_chain(text, "m") for text in texts]
    shared = len(list(block_ends(common)))
    assert chains[0][:shared] == chains[1][:shared] == text_chain(beginning, "m")
    assert not set(chains[0][shared:]) & set(chains[1][shared:])


def test_texts_of_different_endpoints_and_salts_share_no_blocks() -> None:
    text = bytes(FIRST_BLOCK)
    names = [("m", ""), ("m", "s"), ("ms", ""), ("", "ms"), ("", "")]
    assert len({text_chain(text, endpoint, CacheKeys(salt))[0] for endpoint, salt in names}) == len(names)
