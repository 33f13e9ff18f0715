"""Engines that exceed the memory are refused before any process starts."""

from __future__ import annotations

import pytest

from stoker_common.errors import ArgumentError
from stoker_engine import LLM
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.processes import engine_process, memory_check

GIB = 1 << 30


@pytest.mark.parametrize(
    ("args", "memory", "limit"),
    [
        (EngineArgs("m", data_parallel_size=4), GIB, None),
        (EngineArgs("m", data_parallel_size=5), GIB, 4),
        (EngineArgs("m", data_parallel_size=3, tensor_parallel_size=2), GIB, 2),
        (EngineArgs("m", data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2), GIB, 1),
        (EngineArgs("m", tensor_parallel_size=64), GIB, None),  # the sharding check gives a better error
        (EngineArgs("m", data_parallel_size=8, nnodes=2, master_addr="::1"), GIB, None),
        (EngineArgs("m", data_parallel_size=10, nnodes=2, master_addr="::1"), GIB, 4),
        # Half of the second engine is on the other node.
        (
            EngineArgs("m", data_parallel_size=3, tensor_parallel_size=2, nnodes=2, master_addr="::1"),
            3 * GIB // 4,
            None,
        ),
        (EngineArgs("m", data_parallel_size=3, tensor_parallel_size=2, nnodes=2, master_addr="::1"), GIB // 2, 1),
        (EngineArgs("m", data_parallel_size=2, tensor_parallel_size=8, nnodes=4, master_addr="::1"), GIB, None),
        (EngineArgs("m", tensor_parallel_size=64, nnodes=4, master_addr="::1"), GIB, None),
    ],
)
def test_engines_that_exceed_the_memory_are_refused(
    args: EngineArgs, memory: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "host_memory", lambda: memory)
    if limit is None:
        memory_check.check_memory(args)
        return
    with pytest.raises(ArgumentError, match=f"room for {limit} engines") as refused:
        memory_check.check_memory(args)
    assert refused.value.argument == "--data-parallel-size"


def test_no_process_is_started_for_refused_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process.EngineProcess, "__init__", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ArgumentError, match="100000 engines"):
        LLM("demo://gemma-3-270m", data_parallel_size=100_000)
    with pytest.raises(ArgumentError, match="100000 engines"):
        AsyncLLM(EngineArgs("m", data_parallel_size=100_000))
