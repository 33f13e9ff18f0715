"""Parts into which the Triton kernels split the keys of decodes; see `kernels.triton.attention.decode_splits`."""

from __future__ import annotations

from typing import Final, NamedTuple


class PartSizes(NamedTuple):
    """Numbers of keys in parts, by their position. The last part of a sequence may have fewer.

    Attributes:
        short, medium, long: keys of a part; each is a multiple of the former, and all are multiples of a tile's keys.
        medium_from, long_from: positions where medium and long parts begin.
    """

    short: int = 256
    medium: int = 512
    long: int = 1024
    medium_from: int = 16384
    long_from: int = 65536

    def num_parts(self, length: int) -> int:
        """Return the number of parts of a sequence; without keys (padding) it has one, which is empty."""
        medium = min(max(length - self.medium_from, 0), self.long_from - self.medium_from)
        short, long = min(max(length, 1), self.medium_from), max(length - self.long_from, 0)
        return -(-short // self.short) - (-medium // self.medium) - (-long // self.long)


PART_SIZES: Final = PartSizes()
