"""The block-hash chain that prefix caching is keyed by.

    h(0) = H(salt ‖ tokens of block 0)        h(i) = H(h(i-1) ‖ tokens of block i)

A hash names a block's tokens and everything before them, so two sequences share exactly the blocks whose
hashes agree. The hash is cryptographic: a collision would hand one user another's context. The scheme is
part of the contract because a router may compute it too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes


def root_hash(salt: str = "") -> BlockHash:
    """The parent of a sequence's first block. `salt` keeps sequences apart that must not share blocks."""
    return blake2b(salt.encode(), digest_size=16).digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of one full block, given its parent's hash and its tokens."""
    return blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=16).digest()
