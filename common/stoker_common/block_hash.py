"""The block-hash chain: the keys of the prefix cache.

    h(0) = H(root ‖ tokens of block 0 ‖ extra 0)        h(i) = H(h(i-1) ‖ tokens of block i ‖ extra i)

A hash identifies a block's tokens and all tokens before them, so two sequences can share exactly the blocks with equal
hashes. It also covers everything else that separates sequences (`CacheKeys`): the client's cache salt, the adapter, and
content behind placeholder tokens, such as an image. The hash is cryptographic, because a collision would expose one
user's context to another. The data-parallel router computes the same hashes as the engines.

Each part is a separate parameter of BLAKE2b: the parent or namespace is the key, the digest of the root key or extra
key is the salt, and the tokens or the client's cache salt are the message. A value of one part can therefore never act
as a value of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

BlockHash = bytes

_DIGEST_BYTES: Final = 16  # also the size of BLAKE2b's salt


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions of a prompt whose keys and values depend on more than their tokens, such as the placeholders of an
    image.

    Attributes:
        start: index of the first token.
        stop: index after the last token.
        digest: digest of the content; equal only for equal content.
    """

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """Everything besides its tokens on which the block hashes of a sequence depend.

    Attributes:
        salt: the client's cache salt; sequences with different salts share no block.
        root_key: identifies a load of an adapter; empty means no adapter.
        spans: content behind placeholder tokens, in order and without overlap.
    """

    salt: str = ""
    root_key: bytes = b""
    spans: tuple[ContentSpan, ...] = ()

    def root_hash(self, namespace: bytes = b"") -> BlockHash:
        """Return the parent hash of a sequence's first block.

        Args:
            namespace: 16 bytes that separate chains, for example of different endpoints; or empty.
        """
        salt = _digest(self.root_key) if self.root_key else b""
        return blake2b(self.salt.encode(), key=namespace, salt=salt, digest_size=_DIGEST_BYTES).digest()

    def extra_key(self, start: int, stop: int) -> bytes:
        """Return the extra key of a block with tokens `start` to `stop` (exclusive); empty if no span overlaps it.

        It includes the content's position relative to the block, because blocks at different positions in an image have
        different keys and values.
        """
        parts = [
            (span.start - start).to_bytes(8, "little", signed=True)
            + (span.stop - span.start).to_bytes(8, "little")
            + _digest(span.digest)
            for span in self.spans
            if span.start < stop and start < span.stop
        ]
        return b"".join(parts)


#: Keys of sequences whose blocks depend only on their tokens.
NO_KEYS: Final = CacheKeys()


def hash_block(parent: BlockHash, content: bytes | memoryview, extra_key: bytes = b"") -> BlockHash:
    """Return the hash of one full block.

    Args:
        parent: hash of the previous block, or `CacheKeys.root_hash`.
        content: the block's tokens or text.
        extra_key: the block's `CacheKeys.extra_key`.
    """
    salt = _digest(extra_key) if extra_key else b""
    return blake2b(content, key=parent, salt=salt, digest_size=_DIGEST_BYTES).digest()


def extend_chain(
    chain: list[BlockHash], token_ids: Sequence[int], block_size: int, num_blocks: int, keys: CacheKeys
) -> None:
    """Append hashes of full blocks to `chain` until it has `num_blocks`. `token_ids` start with block 0."""
    for index in range(len(chain), num_blocks):
        start, stop = index * block_size, (index + 1) * block_size
        parent = chain[-1] if chain else keys.root_hash()
        extra = keys.extra_key(start, stop) if keys.spans else b""
        chain.append(hash_block(parent, array("q", token_ids[start:stop]).tobytes(), extra))


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=_DIGEST_BYTES).digest()
