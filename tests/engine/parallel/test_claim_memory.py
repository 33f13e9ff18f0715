"""Memory is claimed before it is used."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker_engine.parallel.claim_memory import claim_in_background, claim_memory

from ...support.waiting import until

MIB = 1 << 20


def resident() -> int:
    """Return the bytes of resident memory of this process."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10


@pytest.fixture
def fresh() -> torch.Tensor:
    """Return 64 MiB of untouched memory."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE), dtype=np.uint8))


@pytest.mark.parametrize("cut", [0, 1, 4097])
def test_claimed_memory_is_resident_and_keeps_its_content(fresh: torch.Tensor, cut: int) -> None:
    part = fresh[cut : len(fresh) - cut]
    part[5], part[-5] = 7, 9
    before = resident()
    claimed = claim_memory(part, within_s=60)
    assert len(part) - 8192 <= claimed <= len(part)
    assert resident() - before > 60 * MIB
    assert part[5] == 7 and part[-5] == 9 and part[6] == 0


def test_claiming_ends_in_time(fresh: torch.Tensor) -> None:
    assert 0 < claim_memory(fresh, within_s=-1) < len(fresh)


def test_memory_without_a_whole_page_is_not_claimed(fresh: torch.Tensor) -> None:
    assert claim_memory(fresh[1:4000], within_s=1) == 0


def test_memory_is_claimed_in_the_background_while_in_use(fresh: torch.Tensor) -> None:
    before = resident()
    claim_in_background(fresh, within_s=60)
    fresh[:: 1 << 16] = 7
    until(lambda: resident() - before > 60 * MIB)
    assert bool((fresh[:: 1 << 16] == 7).all()) and int(fresh.sum()) == 7 * len(fresh[:: 1 << 16])
