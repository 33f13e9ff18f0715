"""LoRA adapters in messages between processes.

source     an adapter to load, with a serial number
loaded     properties of a loaded adapter
slot       index of an adapter in a step; assigned by the scheduler
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Number and slot of a request without an adapter.
NO_ADAPTER: Final = -1


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to be loaded.

    Attributes:
        number: serial number of the registration; an adapter that is reloaded in place gets a new number.
        name: name in requests and messages.
        path: folder of its files.
        digest: hexadecimal digest that the files must have; empty: any.
    """

    number: int
    name: str
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """Properties of a loaded adapter.

    Attributes:
        digest: hexadecimal digest of the files' content.
        rank: maximum rank of its matrices.
        num_bytes: memory of its matrices on one rank, in bytes.
        seconds: duration of the load.
    """

    digest: str
    rank: int
    num_bytes: int
    seconds: float


def root_key(number: int, digest: str) -> bytes:
    """Return the key (`CacheKeys.root_key`) that separates an adapter's prefix-cache blocks from the blocks of other
    adapters and of earlier loads of the same adapter.

    Args:
        digest: hexadecimal digest of the adapter's files.
    """
    return digest.encode() + number.to_bytes(8, "big")
