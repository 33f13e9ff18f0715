"""Scores servers by the part of a prompt that each received before, according to `prefix_index`.

A match is a list of masks, one for each leading block of the prompt that an allowed server received: the allowed
servers that received the prompt up to that block, and `FOLLOWED`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from stoker_common.text_prefix_hash import block_ends
from stoker_gateway.scheduling.prefix_index import FOLLOWED, PrefixIndex

#: Maximum average bytes that a new conversation recomputes of a shared prefix, for each server that has it: about 1,024
#: tokens.
HOME_BYTES: Final = 4096

#: Maximum number of servers that `holders` returns.
MAX_HOLDERS: Final = 8

#: End offset in bytes of each block in a prompt. There are more entries than a chain can have blocks.
_ENDS: Final = tuple(block_ends(1 << 40))


class PrefixScorer:
    """Finds the servers that received a prompt's prefix before."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def match(self, chain: Sequence[bytes], allowed: int) -> list[int]:
        """Return the match of a prompt with these hashes, for the servers of the mask `allowed`."""
        masks = [each & (allowed | FOLLOWED) for each in self._index.find(chain)]
        while masks and masks[-1] <= FOLLOWED:
            masks.pop()  # no allowed server received this block
        return masks

    def cached_bytes(self, server: str, masks: list[int]) -> int:
        """Return the bytes of a prompt's prefix that a server received before."""
        bit = self._index.bit(server)
        for number in range(len(masks) - 1, -1, -1):
            if masks[number] & bit:
                return _ENDS[number]
        return 0

    def holders(self, key: bytes, masks: list[int], has_room: Callable[[str], bool]) -> list[str]:
        """Return some servers with room that received long prefixes of a prompt, the longest first.

        Args:
            key: determines which servers are considered if there are more than `MAX_HOLDERS`.
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
        """Whether a prompt with a known prefix seems to begin a new conversation, rather than continue a known one."""
        return len(masks) < len(chain) and bool(masks[-1] & FOLLOWED)

    @staticmethod
    def comes_home(key: bytes, masks: list[int]) -> bool:
        """Whether a new conversation goes to its home (see `picker`) even if the home has to recompute the prefix. The
        probability falls with the prefix's length and rises with the number of servers that have the prefix."""
        draw = int.from_bytes(key[:4], "little") / 2**32
        return draw * _ENDS[len(masks) - 1] < HOME_BYTES * (masks[-1] & ~FOLLOWED).bit_count()
