"""Scores servers by how much of a prompt each was given before, as `prefix_index` remembers it.

A match is a list of masks, one for each known block of the prompt: the servers that were given the prompt up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from stoker_common.text_prefix_hash import block_ends
from stoker_gateway.scheduling.prefix_index import FOLLOWED, PrefixIndex

#: Bytes of a shared beginning that are computed again, on average, to bring a conversation home: some 1,024 tokens.
HOME_BYTES: Final = 4096

#: How many servers that were given a prompt's beginning are weighed.
MAX_HOLDERS: Final = 8

#: Bytes of a prompt up to the end of each block; a chain is shorter.
_ENDS: Final = tuple(block_ends(1 << 40))


class PrefixScorer:
    """Finds the servers that hold a prompt's beginning.

    Args:
        index: which servers were given which beginnings.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def match(self, chain: Sequence[bytes], allowed: int) -> list[int]:
        """The match of a prompt with these hashes, by servers of the mask `allowed`."""
        masks = [each & (allowed | FOLLOWED) for each in self._index.find(chain)]
        while masks and masks[-1] <= FOLLOWED:
            masks.pop()  # whoever was given this has gone
        return masks

    def cached_bytes(self, server: str, masks: list[int]) -> int:
        """Bytes of a prompt's beginning that a server was given before."""
        bit = self._index.bit(server)
        for number in range(len(masks) - 1, -1, -1):
            if masks[number] & bit:
                return _ENDS[number]
        return 0

    def holders(self, key: bytes, masks: list[int], has_room: Callable[[str], bool]) -> list[str]:
        """Servers with room that were given the most of a prompt, the longest beginning first.

        Args:
            key: decides which are named, where there are more than are weighed.
        """
        holders, weighed = list[str](), FOLLOWED
        for number in range(len(masks) - 1, -1, -1):
            new_holders = masks[number] & ~weighed
            if not new_holders:
                continue
            weighed |= new_holders
            start = int.from_bytes(key[:4], "little")
            for server in self._index.names(new_holders, MAX_HOLDERS - len(holders), start):
                if has_room(server):
                    holders.append(server)
            if len(holders) >= MAX_HOLDERS:
                break
        return holders

    @staticmethod
    def is_new(chain: Sequence[bytes], masks: list[int]) -> bool:
        """Whether a prompt with a known beginning is of another conversation that begins alike."""
        return len(masks) < len(chain) and bool(masks[-1] & FOLLOWED)

    @staticmethod
    def comes_home(key: bytes, masks: list[int]) -> bool:
        """Whether a new conversation goes to its home, where the beginning that it shares is computed again: a long
        one rarely at first, and the oftener the more servers have it."""
        draw = int.from_bytes(key[:4], "little") / 2**32
        return draw * _ENDS[len(masks) - 1] < HOME_BYTES * (masks[-1] & ~FOLLOWED).bit_count()
