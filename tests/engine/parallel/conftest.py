"""Ranks on simulated accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from stoker_engine.parallel import torch_communicator
from stoker_engine.parallel.join import Joined, join
from stoker_engine.parallel.layout import RankLayout


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, RankLayout], Joined]]:
    """Join a rank with simulated other ranks."""
    begin = distributed.init_process_group

    def fake(backend: str, *, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        begin("fake", store=FakeStore(), rank=rank, world_size=world_size)

    monkeypatch.setattr(torch_communicator.distributed, "init_process_group", fake)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # a rank sets it in its own process
    yield lambda rank, layout: join(rank, layout, "file:///dev/null", 1.0)
