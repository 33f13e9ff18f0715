"""Index of prompt prefixes and the servers that received them: an estimate of the servers' prefix caches.

An entry maps a block of text (its hash in the chain) to a bit mask of the servers that received it. Looking up a block
for all servers is thus one operation, and blocks that only one server received share that server's integer. The least
recently received blocks are evicted first, and of one prompt the last blocks before the first ones, because a block is
useless without the blocks before it.

A wrong estimate costs time, but does not make a response wrong.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final

#: Bit of a block's mask that is set if another block followed. A prompt that continues differently is then another
#: conversation with a common prefix.
FOLLOWED: Final = 1


class PrefixIndex:
    """Blocks of prompts, and the servers that received them.

    Args:
        max_blocks: maximum number of blocks. A block takes about 250 bytes and, if several servers received it, 1 bit
            more for each server in the pool.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max(1, max_blocks)
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        self._masks: dict[str, tuple[int, int]] = {}  # bit without and with `FOLLOWED`
        self._names: dict[int, str] = {}
        self._retired: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def add_server(self, server: str) -> None:
        """Add a server with an empty cache, even if a server with this name received prompts before.

        The bit of a removed server is reused only after as many other servers were removed as there are servers (at
        least 64): by then most of its blocks have probably been evicted.
        """
        self.remove_server(server)
        if len(self._retired) > max(64, len(self._masks)):
            bit = self._retired.popleft()
        else:
            bit = 2 << (len(self._masks) + len(self._retired))
        self._masks[server], self._names[bit] = (bit, bit | FOLLOWED), server

    def remove_server(self, server: str) -> None:
        """Remove a server; unknown ones are ignored."""
        masks = self._masks.pop(server, None)
        if masks is not None:
            del self._names[masks[0]]
            self._retired.append(masks[0])

    def mask(self, servers: Iterable[str]) -> int:
        """Return the mask of these servers."""
        mask = 0
        for server in servers:
            mask |= self._masks[server][0]
        return mask

    def bit(self, server: str) -> int:
        """Return a server's bit."""
        return self._masks[server][0]

    def names(self, mask: int, limit: int, start: int = 0) -> list[str]:
        """Return up to `limit` servers of a mask. If there are more, `start` determines which."""
        start %= 1 + len(self._masks) + len(self._retired)
        names: list[str] = []
        for part in (mask >> start << start, mask & ((1 << start) - 1)):
            while part and len(names) < limit:
                bit = part & -part
                part ^= bit
                name = self._names.get(bit)
                if name is not None:
                    names.append(name)
        return names

    def find(self, chain: Sequence[bytes]) -> list[int]:
        """Return the server mask of each block of a chain before the first unknown block. Bit 0 is `FOLLOWED`."""
        blocks = self._blocks
        masks = []
        for each in chain:
            mask = blocks.get(each)
            if mask is None:
                break
            masks.append(mask)
        return masks

    def remember(self, chain: Sequence[bytes], server: str) -> None:
        """Record that a server received a prompt."""
        blocks = self._blocks
        last, inner = self._masks[server]
        mask = last
        for each in reversed(chain):
            previous = blocks.get(each)
            if previous is None:
                blocks[each] = mask
            else:
                if previous | mask != previous:
                    blocks[each] = previous | mask
                blocks.move_to_end(each)
            mask = inner
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)
