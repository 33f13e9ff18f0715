"""Adapters are loaded by all ranks or by none, while steps run."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker_common.errors import AdapterError, EngineDeadError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.step import Step
from stoker_engine.exec.rank_executor import RankExecutor
from stoker_engine.exec.supervision import Supervision

from ...support.waiting import until

PROGRAM = Path(__file__).with_name("crashing_rank.py")
SIZE = 3
TIMEOUT_S = 60.0


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[RankExecutor]:
    checkpoint: Any = SimpleNamespace(path=Path("/some/model"))
    args = EngineArgs("org/name", device="cpu", tensor_parallel_size=SIZE)
    made = RankExecutor(args, checkpoint, supervision=Supervision(TIMEOUT_S), program=(str(PROGRAM), str(tmp_path)))
    yield made
    made.shutdown()


def adapter(folder: Path, number: int, **files: str) -> AdapterSource:
    (folder / str(number)).mkdir()
    for name, text in files.items():
        (folder / str(number) / name.replace("_", "-")).write_text(text)
    return AdapterSource(number, f"adapter {number}", str(number))


def step(executor: RankExecutor, number: int, adapters: list[tuple[int, int]]) -> None:
    executor.launch(Step(number, *(array("i") for _ in range(4)), num_decodes=0, num_tokens=0, adapters=adapters))
    executor.collect()


def dropped(folder: Path, rank: int) -> str:
    file = folder / f"dropped-{rank}"
    return file.read_text() if file.exists() else ""


def put(path: Path, content: str) -> None:
    """Write a file atomically: a rank waits for it."""
    whole = path.with_name(f"{path.name}.part")
    whole.write_text(content)
    whole.rename(path)


def test_ranks_load_adapters_while_steps_run(executor: RankExecutor, tmp_path: Path) -> None:
    slow = executor.load_adapter(adapter(tmp_path, 1))
    for number in range(5):
        step(executor, number, [])
    for rank in range(SIZE - 1):
        put(tmp_path / "1" / f"content-{rank}", "abc")
    step(executor, 5, [])
    assert not slow.done()
    put(tmp_path / "1" / f"content-{SIZE - 1}", "abc")
    assert slow.result(TIMEOUT_S) == LoadedAdapter("abc", 8, 100, SIZE - 1)  # seconds of the slowest rank
    step(executor, 6, [(0, 1)])
    executor.drop_adapter(1)
    step(executor, 7, [])
    until(lambda: all(dropped(tmp_path, rank) == "1 " for rank in range(SIZE)), "the ranks have dropped the adapter")


def test_an_adapter_that_fails_on_one_rank_is_dropped_by_all(executor: RankExecutor, tmp_path: Path) -> None:
    loading = executor.load_adapter(adapter(tmp_path, 1, content="abc", wrong_1="its files are gone"))
    with pytest.raises(AdapterError, match=r"^rank 1 of 3: its files are gone$"):
        loading.result(TIMEOUT_S)
    step(executor, 0, [])
    until(lambda: dropped(tmp_path, 0) == dropped(tmp_path, 2) == "1 ", "the ranks have dropped the adapter")
    assert not dropped(tmp_path, 1)


def test_the_same_error_of_all_ranks_is_reported_once(executor: RankExecutor, tmp_path: Path) -> None:
    wrong = {f"wrong_{rank}": "a rank of 99" for rank in range(SIZE)}
    with pytest.raises(AdapterError, match=r"^a rank of 99$"):
        executor.load_adapter(adapter(tmp_path, 1, **wrong)).result(TIMEOUT_S)


def test_files_that_differ_between_ranks_are_refused(executor: RankExecutor, tmp_path: Path) -> None:
    loading = executor.load_adapter(adapter(tmp_path, 1, content="abc", content_2="def"))
    with pytest.raises(AdapterError, match=r"adapter 1 in 1 differ between nodes; .*rank 2 of 3: def\)"):
        loading.result(TIMEOUT_S)
    step(executor, 0, [])
    until(lambda: all(dropped(tmp_path, rank) == "1 " for rank in range(SIZE)), "the ranks have dropped the adapter")
    assert executor.load_adapter(adapter(tmp_path, 2, content="abc")).result(TIMEOUT_S).digest == "abc"


def test_loads_fail_when_a_rank_dies(executor: RankExecutor, tmp_path: Path) -> None:
    loading = executor.load_adapter(adapter(tmp_path, 1))
    executor._ranks[1].kill()
    with pytest.raises(EngineDeadError):
        loading.result(TIMEOUT_S)
