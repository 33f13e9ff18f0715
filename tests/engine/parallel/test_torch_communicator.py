"""Reductions, gathers and broadcasts between real processes, compared with torch's results on all inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .collective_rank import DTYPES, SHAPES, WIDTHS, rank_input

PROGRAM = Path(__file__).with_name("collective_rank.py")


def start(size: int, folder: Path, mode: str, timeout_s: int = 60) -> list[subprocess.Popen[bytes]]:
    file = os.memfd_create("rendezvous")
    try:
        return [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, (rank, size, file, timeout_s, folder, mode))],
                pass_fds=(file,),
            )
            for rank in range(size)
        ]
    finally:
        os.close(file)


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_operations_equal_torch(size: int, tmp_path: Path) -> None:
    for process in start(size, tmp_path, "operations"):
        assert process.wait(120) == 0
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for result in results:  # the same bits on every rank
        for name, tensors in result.items():
            for mine, first in zip(tensors, results[0][name], strict=True):
                assert torch.equal(mine, first), name
    _check_sums(results[0], size)
    _check_joins(results[0], size)
    _check_copies(results[0])


def _check_sums(result: dict[str, list[torch.Tensor]], size: int) -> None:
    cases = [(shape, dtype, _same) for dtype in DTYPES for shape in SHAPES]
    for (shape, dtype, layout), found in zip(
        [*cases, ((12, 10), torch.float32, torch.Tensor.t)], result["sums"], strict=True
    ):
        parts = [layout(rank_input(rank, shape, dtype)).double() for rank in range(size)]
        exact = torch.stack(parts).sum(0)
        bound = torch.stack(parts).abs().sum(0) * torch.finfo(dtype).eps
        assert found.dtype == dtype and found.shape == exact.shape
        assert ((found.double() - exact).abs() <= bound).all()
    # Sums do not depend on the run or the batch.
    for found, again, rows in zip(result["sums"], result["again"], result["rows"], strict=False):
        assert torch.equal(found, again)
        assert torch.equal(found, rows)


def _check_joins(result: dict[str, list[torch.Tensor]], size: int) -> None:
    shapes = [(dtype, rows, widths) for dtype in DTYPES for widths in WIDTHS for rows in (1, 6)]
    *found, transposed = result["gathered"]
    for (dtype, rows, widths), joined in zip(shapes, found, strict=True):
        assert torch.equal(joined, torch.cat([rank_input(r, (rows, widths[r]), dtype) for r in range(size)], dim=-1))
    parts = [rank_input(rank, (12, 10), torch.float32).t() for rank in range(size)]
    assert torch.equal(transposed, torch.cat(parts, dim=-1))


def _check_copies(result: dict[str, list[torch.Tensor]]) -> None:
    *found, transposed, integers, booleans = result["sent"]
    for (dtype, shape), sent in zip([(d, s) for d in DTYPES for s in SHAPES], found, strict=True):
        assert torch.equal(sent, rank_input(0, shape, dtype))
    assert torch.equal(transposed, rank_input(0, (12, 10), torch.float32).t())
    assert torch.equal(integers, torch.arange(5))
    assert torch.equal(booleans, torch.arange(5) % 2 == 0)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    "how, within", [("exit", (0, 10)), ("sleep", (2, 15)), pytest.param("close", (0, 10), marks=pytest.mark.slow)]
)
def test_lost_rank_ends_the_others_in_time(
    how: str, within: tuple[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    processes = start(2, tmp_path, how, timeout_s=2)
    kill: Callable[[], None] = processes[1].kill
    request.addfinalizer(processes[1].wait)
    request.addfinalizer(kill)
    assert processes[0].wait(120) == 0
    seconds, _, report = (tmp_path / "0.txt").read_text().partition(" ")
    assert within[0] <= float(seconds) <= within[1]
    assert "rank 0" in report and "all_reduce" in report
