"""The hash chain over a prompt's text, for routers without a tokenizer.

    h(0) = H(endpoint ‖ keys ‖ text of block 0 ‖ extra 0)        h(i) = H(h(i-1) ‖ text of block i ‖ extra i)

It approximates the chain over tokens (`block_hash.py`): if the texts of two prompts have a long common prefix, their
token sequences usually have one, too.

Blocks grow with their distance from the start: after every `BLOCKS_OF_A_SIZE` blocks their size doubles. Except for the
first 16 blocks, a block is therefore at most 1/16 of the text before it, and 32 MiB need fewer than 400 hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stoker_common.block_hash import NO_KEYS, BlockHash, CacheKeys, hash_block

#: Size of the first blocks, in bytes: about 128 tokens of English text.
FIRST_BLOCK: Final = 512

#: Number of consecutive blocks of equal size, before the size doubles.
BLOCKS_OF_A_SIZE: Final = 32


def block_ends(size: int) -> Iterator[int]:
    """Yield the end offsets of the full blocks of a text of `size` bytes, in order."""
    end, block = 0, FIRST_BLOCK
    while True:
        for _ in range(BLOCKS_OF_A_SIZE):
            end += block
            if end > size:
                return
            yield end
        block *= 2


def text_chain(text: bytes | memoryview, endpoint: str, keys: CacheKeys = NO_KEYS) -> list[BlockHash]:
    """Return the hashes of a text's full blocks.

    Args:
        text: the prompt in UTF-8, as the model sees it or in any form that preserves common prefixes.
        endpoint: the prompt's endpoint; prompts of different endpoints have different hashes.
        keys: other properties that separate prompts: the request's ``cache_salt``, and content such as images, with
            `spans` in bytes of `text`.
    """
    parent = keys.root_hash(CacheKeys(endpoint).root_hash())
    chain, view, start = list[BlockHash](), memoryview(text), 0
    for end in block_ends(len(view)):
        parent = hash_block(parent, view[start:end], keys.extra_key(start, end))
        chain.append(parent)
        start = end
    return chain
