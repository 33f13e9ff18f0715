"""A container's limits, in the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker_common.subprocesses import host_memory
from stoker_engine.parallel import device, processors


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        (["200000 100000"], 2),
        (["150000 100000"], 2),
        (["50000 100000"], 1),
        (["max 100000"], 4),
        (["-1", "100000"], 4),
        (["300000", "100000"], 3),
        (["6400000 100000"], 4),
    ],
)
def test_threads_stay_within_the_containers_processors(
    files: list[str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = tuple(str(tmp_path / str(index)) for index in range(len(files)))
    for path, text in zip(paths, files, strict=True):
        Path(path).write_text(text + "\n")
    monkeypatch.setattr(processors, "_CPU_QUOTAS", (("/nowhere",), paths))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        device.limit_threads()
        assert torch.get_num_threads() == threads
        torch.set_num_threads(4)
        for limit in (2, None, 8):  # later calls with no limit, or a higher one, change nothing
            device.limit_threads(limit)
            assert torch.get_num_threads() == min(2, threads)
    finally:
        torch.set_num_threads(before)


def test_memory_is_limited_by_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host_memory, "_CGROUP_LIMITS", (str(limit),))
    limit.write_text("1000000\n")
    assert device.memory_bytes(torch.device("cpu")) == 1000000
    limit.write_text("max\n")
    assert device.memory_bytes(torch.device("cpu")) > 1000000
