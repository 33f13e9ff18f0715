"""A LoRA adapter as processes name it to each other.

source     what is to be loaded: the server numbers them, engine and ranks load them
loaded     what the files hold, as every rank has found
slot       where a step finds an adapter, of ``--max-loras``; the scheduler assigns them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: The number, or the slot, of a request without an adapter.
NO_ADAPTER: Final = -1


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to be loaded.

    Attributes:
        number: counts the loads of a server: an adapter that is loaded again, in place, has another number.
        name: by which requests choose it.
        path: the folder with its files.
        digest: hexadecimal, of the content that the files must have; empty: any.
    """

    number: int
    name: str
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What an adapter's files hold.

    Attributes:
        digest: hexadecimal, of the files' content.
        rank: the largest of its matrices.
        num_bytes: of its matrices in memory, on one rank.
        seconds: that loading took.
    """

    digest: str
    rank: int
    num_bytes: int
    seconds: float


def root_key(number: int, digest: str) -> bytes:
    """What separates the prefix-cache blocks of an adapter from those of others, and of itself before it was loaded
    again (`CacheKeys.root_key`).

    Args:
        digest: of its content, hexadecimal.
    """
    return digest.encode() + number.to_bytes(8, "big")
