"""The block-hash chain that prefix caching is keyed by.

    h(0) = H(root ‖ tokens of block 0 ‖ extra 0)        h(i) = H(h(i-1) ‖ tokens of block i ‖ extra i)

A hash names a block's tokens and everything before them, so two sequences share exactly the blocks whose hashes agree.
Besides the tokens it covers what else the keys and values depend on (`CacheKeys`): what computes them, and content that
stands behind tokens of a prompt, such as an image. The hash is cryptographic: a collision would hand one user another's
context. The scheme is part of the contract because a router computes it too.

Each part goes into a parameter of BLAKE2b (RFC 7693) of its own: the parent is its key, the root key and extra keys are
its salt, and the tokens or the client's salt are its message. So no value of one part can stand for a value of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

BlockHash = bytes

_DIGEST_BYTES: Final = 16  # also the longest salt of BLAKE2b


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions of a prompt whose keys and values depend on more than their tokens: the placeholders of an image.

    Attributes:
        start: index of the first token.
        stop: index behind the last token.
        digest: names the content; equal only for equal content.
    """

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """What the blocks of a sequence depend on besides its tokens.

    Attributes:
        salt: the client's; sequences with different ones share no block.
        root_key: names what computes: the model, an adapter by its content and load generation. Empty: the model alone.
        spans: content behind tokens, in order; spans do not overlap.
    """

    salt: str = ""
    root_key: bytes = b""
    spans: tuple[ContentSpan, ...] = ()

    def root_hash(self, namespace: bytes = b"") -> BlockHash:
        """The parent of a sequence's first block.

        Args:
            namespace: 16 bytes that separate chains of one kind from those of others; empty: none.
        """
        salt = _digest(self.root_key) if self.root_key else b""
        return blake2b(self.salt.encode(), key=namespace, salt=salt, digest_size=_DIGEST_BYTES).digest()

    def extra_key(self, start: int, stop: int) -> bytes:
        """The part of `spans` that the tokens from `start` to `stop` (exclusive) stand for; empty: none.

        It holds the position of the content relative to the block: a block that begins elsewhere in the same image has
        other keys and values.
        """
        parts = [
            (span.start - start).to_bytes(8, "little", signed=True)
            + (span.stop - span.start).to_bytes(8, "little")
            + _digest(span.digest)
            for span in self.spans
            if span.start < stop and start < span.stop
        ]
        return b"".join(parts)


#: Of sequences whose blocks depend on their tokens alone.
NO_KEYS: Final = CacheKeys()


def hash_block(parent: BlockHash, content: bytes | memoryview, extra_key: bytes = b"") -> BlockHash:
    """The hash of one full block.

    Args:
        parent: the hash of the block before it, or `CacheKeys.root_hash`.
        content: the block's tokens, or its text.
        extra_key: what else the block depends on, `CacheKeys.extra_key`.
    """
    salt = _digest(extra_key) if extra_key else b""
    return blake2b(content, key=parent, salt=salt, digest_size=_DIGEST_BYTES).digest()


def extend_chain(
    chain: list[BlockHash], token_ids: Sequence[int], block_size: int, num_blocks: int, keys: CacheKeys
) -> None:
    """Appends hashes of full blocks to `chain` until it has `num_blocks`; `token_ids` begin with block 0."""
    for index in range(len(chain), num_blocks):
        start, stop = index * block_size, (index + 1) * block_size
        parent = chain[-1] if chain else keys.root_hash()
        extra = keys.extra_key(start, stop) if keys.spans else b""
        chain.append(hash_block(parent, array("q", token_ids[start:stop]).tobytes(), extra))


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=_DIGEST_BYTES).digest()
