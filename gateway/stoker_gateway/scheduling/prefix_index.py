"""Which servers were given which beginnings of prompts: a guess at what their caches hold, bounded in memory.

An entry is a block of text (its hash in the chain) and the servers it went to, as the bits of a number: so what is
asked of many servers at once is one operation, and blocks that went to one server share its number. Entries used
longest ago are forgotten first; of a prompt, its end before its beginning, which is of no use without it.

A wrong guess costs time, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final

#: Set where something followed a block: a prompt that goes on otherwise is another conversation that begins alike.
FOLLOWED: Final = 1


class PrefixIndex:
    """Blocks of prompts, and the servers that were given them.

    Args:
        max_blocks: how many are kept. One takes some 250 bytes; where it went to several servers, an eighth of a byte
            more for each server there is.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max(1, max_blocks)
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        self._masks: dict[str, tuple[int, int]] = {}  # without and with `FOLLOWED`
        self._names: dict[int, str] = {}
        self._retired: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    def add_server(self, server: str) -> None:
        """A server that holds nothing, whatever it held under this name before.

        The place of one that has gone is taken only after as many others have gone as there are servers: by then most
        of what it was given is forgotten.
        """
        self.remove_server(server)
        if len(self._retired) > max(64, len(self._masks)):
            bit = self._retired.popleft()
        else:
            bit = 2 << (len(self._masks) + len(self._retired))
        self._masks[server], self._names[bit] = (bit, bit | FOLLOWED), server

    def remove_server(self, server: str) -> None:
        """A server has gone; unknown ones are ignored."""
        masks = self._masks.pop(server, None)
        if masks is not None:
            del self._names[masks[0]]
            self._retired.append(masks[0])

    def mask(self, servers: Iterable[str]) -> int:
        """The bits of these servers."""
        mask = 0
        for server in servers:
            mask |= self._masks[server][0]
        return mask

    def bit(self, server: str) -> int:
        """A server's bit."""
        return self._masks[server][0]

    def names(self, mask: int, limit: int, start: int = 0) -> list[str]:
        """Up to `limit` of the servers of a mask; which of them, when there are more, `start` decides."""
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
        """The masks of a chain's blocks, up to the first that is unknown. Bit 0 says whether something followed."""
        blocks = self._blocks
        masks = []
        for each in chain:
            mask = blocks.get(each)
            if mask is None:
                break
            masks.append(mask)
        return masks

    def remember(self, chain: Sequence[bytes], server: str) -> None:
        """A server is given a prompt."""
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
