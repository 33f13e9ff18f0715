"""The graph for a step, for numbers of sequences and lengths around the captured ones."""

from __future__ import annotations

import bisect
import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from stoker_engine.attention.triton import TritonBackend
from stoker_engine.core.step import Step
from stoker_engine.exec.device_batch import DeviceBatch, empty_values
from stoker_engine.exec.graphs import StepGraphs, StepShape
from stoker_engine.exec.kv_cache import KVCachePlan
from stoker_engine.kernels.triton.attention.decode_splits import PART_SIZES
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.sizing.kv_format import kv_format


def graphs_of(
    max_seqs: int, num_blocks: int, max_model_len: int, has_adapters: bool = False, **options: Any
) -> StepGraphs:
    """Return graphs that compute nothing."""
    plan = KVCachePlan(kv_format("auto", "torch.bfloat16"), [], num_blocks, 16, max_model_len, 2048, 1024)
    model: Any = SimpleNamespace(backend=TritonBackend(**options))
    device = torch.device("cpu")
    batch = DeviceBatch(empty_values(max_seqs), device)
    graphs = StepGraphs(model, plan, [], batch, BatchRows(), max_seqs, 1, device, has_adapters)
    graphs.capture(lambda compute: (torch.empty(0), lambda: None))
    return graphs


def step_of(starts: list[int], num_decodes: int) -> Step:
    rows, ones = array("i", range(len(starts))), array("i", [1] * len(starts))
    return Step(0, rows, array("i", starts), ones, ones, num_decodes, len(starts))


#: Where the parts of a sequence begin.
PART_BEGINS = [*range(0, 16384, 256), *range(16384, 65536, 512), *range(65536, 1 << 18, 1024)]


def parts(lengths: np.ndarray) -> int:
    return sum(bisect.bisect_left(PART_BEGINS, max(int(length), 1)) for length in lengths)


@pytest.mark.parametrize(
    ("max_seqs", "num_blocks", "max_model_len"),
    [(1, 64, 300), (5, 40, 600), (17, 4096, 40_000), (600, 9000, 131_072), (1500, 20_000, 4096)],
)
def test_the_smallest_graph_with_room_is_chosen(max_seqs: int, num_blocks: int, max_model_len: int) -> None:
    graphs, rng = graphs_of(max_seqs, num_blocks, max_model_len), random.Random(max_seqs)
    sizes = sorted(shape.sequences for shape in graphs.captured)
    assert sizes[-1] == min(max_seqs, 1024)
    found = set()
    for _ in range(400):
        count = min(max_seqs, max(1, rng.choice(sizes) + rng.choice((-1, 0, 1))))
        longest = rng.choice((PART_SIZES.short, 1024, max_model_len))
        starts = [rng.choice((0, rng.randrange(longest), longest - 1)) % max_model_len for _ in range(count)]
        graph = graphs.find(step_of(starts, count))
        size = min((size for size in sizes if size >= count), default=None)
        needed = parts(np.array(starts) + 1) + (size or count) - count
        rooms = sorted(parts(each.planned) for each in graphs.captured[StepShape(size, 1)]) if size is not None else []
        expected = next((room for room in rooms if room >= needed), None)
        assert (None if graph is None else (graph.size, parts(graph.planned))) == (
            None if expected is None else (size, expected)
        )
        found.add(graph is not None)
    assert found == ({True} if max_seqs == 1 else {True, False})


def test_steps_other_than_plain_decodes_have_no_graph() -> None:
    graphs, rows = graphs_of(8, 512, 4096), array("i", [0, 1, 2])
    for lengths in ([1, 1, 2], [2, 2, 2], [7, 1, 3]):
        step = Step(0, rows, array("i", [5, 9, 3]), array("i", lengths), array("i", [1] * 3), 0, sum(lengths))
        assert graphs.find(step) is None
    assert StepShape.of(step_of([5, 9, 3], num_decodes=3)) == (3, 1, False)


def test_lengths_that_do_not_matter_are_captured_once() -> None:
    assert {len(each) for each in graphs_of(8, 4096, 40_000, batch_invariant=True).captured.values()} == {1}
    assert {len(each) for each in graphs_of(8, 4096, 200).captured.values()} == {1}
    for captured in graphs_of(8, 1 << 16, 40_000).captured.values():
        assert [int(each.planned[0]) for each in captured] == [1024, 4096, 16384, 40_000]


def test_steps_with_adapters_have_their_own_graphs() -> None:
    graphs, step = graphs_of(4, 64, 300, has_adapters=True), step_of([5, 9, 3], num_decodes=3)
    graphs._rows.extends_experts = False
    for has_adapters in (False, True):
        graph = graphs.find(step, has_adapters)
        assert graph is not None
        assert graph in graphs.captured[StepShape(4, 1, has_adapters)]
    graphs._rows.extends_experts = True  # experts run one by one, which graphs cannot
    assert graphs.find(step, has_adapters=True) is None
    assert graphs.find(step) is not None


def test_steps_with_adapters_have_no_graph_if_lora_is_off() -> None:
    graphs = graphs_of(4, 64, 300)
    graphs._rows.extends_experts = False
    assert graphs.find(step_of([5], num_decodes=1), has_adapters=True) is None
