"""The chain of hashes over a prompt's text, for who has no tokenizer: a router before the servers.

    h(0) = H(endpoint ‖ keys ‖ text of block 0)        h(i) = H(h(i-1) ‖ text of block i ‖ extra i)

It stands beside the chain over tokens (`block_hash.py`): two prompts whose text begins alike have blocks alike, since
what a chat template and a tokenizer make of them begins alike too.

Blocks grow with their distance from the beginning: `BLOCKS_OF_A_SIZE` of each size, which then doubles. So a block is
at most a 32nd of what is before it, beyond the first ones, and 32 MiB are less than 400 hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stoker_common.block_hash import NO_KEYS, BlockHash, CacheKeys, hash_block

#: Bytes of the first blocks, some 128 tokens of English.
FIRST_BLOCK: Final = 512

#: How many blocks follow each other before their size doubles.
BLOCKS_OF_A_SIZE: Final = 32


def block_ends(size: int) -> Iterator[int]:
    """Where the full blocks of a text of `size` bytes end, in order."""
    end, block = 0, FIRST_BLOCK
    while True:
        for _ in range(BLOCKS_OF_A_SIZE):
            end += block
            if end > size:
                return
            yield end
        block *= 2


def text_chain(text: bytes | memoryview, endpoint: str, keys: CacheKeys = NO_KEYS) -> list[BlockHash]:
    """The hashes of a text's full blocks.

    Args:
        text: the prompt in UTF-8, as the model will see it or in any form that begins alike when prompts do.
        endpoint: whose prompts these are; those of others have other hashes.
        keys: what else separates prompts: the request's ``cache_salt`` and, with `spans` counted in bytes of `text`,
            content such as images.
    """
    parent = keys.root_hash(CacheKeys(endpoint).root_hash())
    chain, view, start = list[BlockHash](), memoryview(text), 0
    for end in block_ends(len(view)):
        parent = hash_block(parent, view[start:end], keys.extra_key(start, end))
        chain.append(parent)
        start = end
    return chain
