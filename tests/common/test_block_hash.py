"""The hash chain over a prompt's tokens: blocks differ if anything else that they depend on differs, and only then."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stoker_common.block_hash import NO_KEYS, BlockHash, CacheKeys, ContentSpan, extend_chain
from stoker_common.text_prefix_hash import block_ends, text_chain

BLOCK = 16


def chain_of(token_ids: Sequence[int], keys: CacheKeys = NO_KEYS) -> list[BlockHash]:
    chain = list[BlockHash]()
    extend_chain(chain, token_ids, BLOCK, len(token_ids) // BLOCK, keys)
    return chain


def num_shared(first: Sequence[BlockHash], second: Sequence[BlockHash]) -> int:
    """Return the number of equal leading blocks; all others must differ."""
    pairs = zip(first, second, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert not set(first[shared:]) & set(second[shared:])
    return shared


def test_hashes_are_stable_across_releases() -> None:
    """The hashes are stable, because programs of different releases compare them."""
    assert CacheKeys().root_hash().hex() == "cae66941d9efbd404e4d88758ea67670"
    assert CacheKeys("s").root_hash().hex() == "bbf7769fea5c8d41a9068bd6edbb2c13"
    expected = ["a34505c8d451e2019e85a5d7f14504da", "118590410043a8168602d0c9d13f5623"]
    assert [each.hex() for each in chain_of(range(32))] == expected
    assert chain_of(range(16), CacheKeys("s"))[0].hex() == "c6ceb9bf0321bab37db72376aebe6c76"
    text = bytes(range(256)) * 8
    assert text_chain(text, "m")[-1].hex() == "44da5aa705c0ddda54b6f64723b80a20"
    assert text_chain(text, "m", CacheKeys("s"))[-1].hex() == "553943afe8ff9d1c664a0e6855a5bf2f"


@given(st.binary(min_size=1, max_size=200), st.binary(max_size=200))
def test_salt_equal_to_a_root_key_shares_no_blocks(root_key: bytes, other: bytes) -> None:
    """Clients choose their salt, which may read like an adapter's name."""
    salts = {root_key.decode("latin-1"), root_key.hex(), other.decode("latin-1"), ""}
    adapter = chain_of(range(32), CacheKeys(root_key=root_key))
    text = text_chain(bytes(1024), "m", CacheKeys(root_key=root_key))
    for salt in salts:
        assert num_shared(adapter, chain_of(range(32), CacheKeys(salt))) == 0
        assert num_shared(text, text_chain(bytes(1024), "m", CacheKeys(salt))) == 0
        salted = chain_of(range(32), CacheKeys(salt, root_key))
        assert num_shared(adapter, salted) == (0 if salt else 2)
    if other != root_key:
        assert num_shared(adapter, chain_of(range(32), CacheKeys(root_key=other))) == 0


def _spans(chance: random.Random, length: int) -> list[ContentSpan]:
    edges = sorted(chance.sample(range(length + 1), 2 * chance.randint(0, 4)))
    return [
        ContentSpan(a, b, chance.choice([b"x", b"y", b"longer" * 9]))
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def _differing(length: int, first: Sequence[ContentSpan], second: Sequence[ContentSpan]) -> int:
    """Return the first token at which the contents differ: another image, or another part of it."""

    def content(spans: Sequence[ContentSpan]) -> list[tuple[bytes, int, int] | None]:
        found: list[tuple[bytes, int, int] | None] = [None] * length
        for span in spans:
            for index in range(span.start, span.stop):
                found[index] = span.digest, index - span.start, span.stop - span.start
        return found

    pairs = zip(content(first), content(second), strict=True)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), length)


@given(st.integers(0, 2**32))
def test_equal_tokens_share_exactly_the_blocks_before_other_content(seed: int) -> None:
    chance = random.Random(seed)
    length = chance.randint(BLOCK, 12 * BLOCK)
    tokens = [chance.randrange(50)] * length
    first = _spans(chance, length)
    second = list(first)
    match chance.randrange(4):
        case 0 if second:
            index = chance.randrange(len(second))
            span = second[index]
            second[index] = ContentSpan(span.start, span.stop, span.digest + b"!")
        case 1 if second:
            del second[chance.randrange(len(second))]
        case 2 if second:
            index = chance.randrange(len(second))
            span = second[index]
            if span.stop - span.start > 1:
                second[index] = ContentSpan(span.start + 1, span.stop, span.digest)
        case 3:
            second = _spans(chance, length)
    chains = [chain_of(tokens, CacheKeys(spans=tuple(each))) for each in (first, second)]
    assert num_shared(*chains) == min(_differing(length, first, second) // BLOCK, length // BLOCK)
    size = 40 * length  # bytes, several blocks of text
    wide = [[ContentSpan(40 * s.start, 40 * s.stop, s.digest) for s in spans] for spans in (first, second)]
    texts = [text_chain(bytes(size), "m", CacheKeys(spans=tuple(spans))) for spans in wide]
    differing = _differing(size, *wide)
    assert num_shared(*texts) == sum(end <= differing for end in block_ends(size))


def test_extra_key_never_equals_tokens_of_a_client() -> None:
    """No tokens or image parts chosen by a client produce another prompt's hash."""
    spans = (ContentSpan(0, 16, b"x"),)
    plain = set(chain_of(range(64)))
    assert not plain & set(chain_of(range(64), CacheKeys(spans=spans)))
    one = CacheKeys(spans=(ContentSpan(2, 6, b"ab"), ContentSpan(6, 9, b"c")))
    other = CacheKeys(spans=(ContentSpan(2, 6, b"a"), ContentSpan(6, 9, b"bc")))
    assert num_shared(chain_of(range(16), one), chain_of(range(16), other)) == 0
