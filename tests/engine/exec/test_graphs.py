"""The graph for a step, for numbers of sequences and tokens and for lengths around the captured ones."""

from __future__ import annotations

import bisect
import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from stoker_engine.attention.triton import TritonBackend
from stoker_engine.core.step import Step
from stoker_engine.exec.capture import capture_all
from stoker_engine.exec.capture_agreement import Capture
from stoker_engine.exec.device_batch import DeviceBatch, empty_values
from stoker_engine.exec.finish.sampling_graphs import SamplingGraphs
from stoker_engine.exec.graphs import StepGraphs
from stoker_engine.exec.kv_cache import KVCachePlan
from stoker_engine.kernels.triton.attention.decode_splits import PART_SIZES
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.step_shapes import StepShape, captured_shapes

from ...support.engine.thread_ranks import thread_groups


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


def step_of(starts: list[int], num_decodes: int, lengths: list[int] | None = None) -> Step:
    """Create a step; without lengths, of one token for each sequence."""
    rows, ones = array("i", range(len(starts))), array("i", [1] * len(starts))
    of_each = ones if lengths is None else array("i", lengths)
    return Step(0, rows, array("i", starts), of_each, ones, num_decodes, sum(of_each))


#: Where the parts of a sequence begin.
PART_BEGINS = [*range(0, 16384, 256), *range(16384, 65536, 512), *range(65536, 1 << 18, 1024)]


def parts(lengths: np.ndarray) -> int:
    return sum(bisect.bisect_left(PART_BEGINS, max(int(length), 1)) for length in lengths)


@pytest.mark.parametrize(
    ("max_seqs", "num_blocks", "max_model_len"),
    [(1, 64, 300), (5, 40, 600), (17, 4096, 40_000), (600, 9000, 131_072), (1500, 20_000, 4096)],
)
@pytest.mark.parametrize("has_chunks", [False, True])
def test_the_smallest_graph_with_room_is_chosen(
    has_chunks: bool, max_seqs: int, num_blocks: int, max_model_len: int
) -> None:
    graphs, rng = graphs_of(max_seqs, num_blocks, max_model_len), random.Random(max_seqs)
    shapes = sorted(shape for shape in graphs.captured if shape.has_chunks == has_chunks)
    assert (
        shapes[-1] == (2048, min(max_seqs, 2048), True, False) if has_chunks else shapes[-1][0] == min(max_seqs, 1024)
    )
    found = set()
    for _ in range(300):
        size = max(1, rng.choice(shapes).tokens + rng.choice((-1, 0, 1)))
        if has_chunks:
            tokens = max(2, size)
            count = rng.randint(1, min(max_seqs, tokens - 1))
            decodes = rng.choice((0, rng.randrange(count), count - 1))
            lengths = [1] * decodes + [tokens - decodes - (count - decodes - 1)] + [1] * (count - decodes - 1)
        else:
            count = decodes = tokens = min(max_seqs, size)
            lengths = [1] * count
        longest = rng.choice((PART_SIZES.short, 1024, max_model_len))
        starts = [rng.choice((0, rng.randrange(longest), longest - 1)) % max_model_len for _ in range(count)]
        graph = graphs.find(step_of(starts, decodes, lengths))
        shape = min((each for each in shapes if each[0] >= tokens and each[1] >= count), default=None)
        needed = parts(np.array(starts[:decodes], dtype=np.int64) + 1)
        needed += shape.sequences - decodes if shape is not None else 0  # padding has empty parts
        rooms = sorted(parts(each.planned) for each in graphs.captured[shape]) if shape is not None else []
        expected = next((room for room in rooms if room >= needed), None)
        assert (None if graph is None else (graph.shape, parts(graph.planned))) == (
            None if expected is None else (shape, expected)
        )
        found.add(graph is not None)
    assert found == ({True} if max_seqs == 1 and not has_chunks else {True, False})


@pytest.mark.parametrize(("max_seqs", "max_tokens"), [(1, 1), (1, 2), (6, 48), (256, 2048), (1024, 300), (1024, 16384)])
def test_shapes_cover_all_steps_up_to_a_limit(max_seqs: int, max_tokens: int) -> None:
    shapes = captured_shapes(max_seqs, max_tokens)
    decodes, chunks = ({each for each in shapes if each.has_chunks == kind} for kind in (False, True))
    assert {each.tokens for each in decodes} >= {1, min(max_seqs, max_tokens, 1024)}
    assert max(each.tokens for each in chunks) == min(max_tokens, 2048)
    assert all(each.sequences == min(each.tokens, max_seqs) for each in chunks)
    assert all(each.sequences == each.tokens <= max_seqs for each in decodes)
    assert len(set(shapes)) == len(shapes) and shapes == sorted(shapes, reverse=True)


def test_padding_is_at_most_a_third_of_a_graph_and_a_fifth_of_a_large_one() -> None:
    sizes = sorted(each.tokens for each in captured_shapes(1024, 8192) if each.has_chunks)
    assert all(before >= (0.8 if before >= 1024 else 2 / 3) * size for before, size in pairwise(sizes) if before >= 128)


def test_lengths_that_do_not_matter_are_captured_once() -> None:
    assert {len(each) for each in graphs_of(8, 4096, 40_000, batch_invariant=True).captured.values()} == {1}
    assert {len(each) for each in graphs_of(8, 4096, 200).captured.values()} == {1}
    for shape, captured in graphs_of(8, 1 << 16, 40_000).captured.items():
        lengths = [1024, 40_000] if shape.has_chunks else [1024, 4096, 16384, 40_000]
        assert [int(each.planned[0]) for each in captured] == lengths


def test_steps_with_adapters_have_their_own_graphs() -> None:
    graphs, step = graphs_of(4, 64, 300, has_adapters=True), step_of([5, 9, 3], num_decodes=3)
    graphs._rows.extends_experts = False
    for has_adapters in (False, True):
        graph = graphs.find(step, has_adapters)
        assert graph is not None
        assert graph in graphs.captured[StepShape(4, 4, False, has_adapters)]
        with_chunk = graphs.find(step_of([5, 9], 1, [1, 2]), has_adapters)
        assert with_chunk is not None
        assert with_chunk in graphs.captured[StepShape(8, 4, True, has_adapters)]
    graphs._rows.extends_experts = True  # experts run one by one, which graphs cannot
    assert graphs.find(step, has_adapters=True) is None
    assert graphs.find(step) is not None


def test_steps_with_adapters_have_no_graph_if_lora_is_off() -> None:
    graphs = graphs_of(4, 64, 300)
    graphs._rows.extends_experts = False
    assert graphs.find(step_of([5], num_decodes=1), has_adapters=True) is None


def fake_cuda(monkeypatch: pytest.MonkeyPatch, taken_mib: int, calls: list[str]) -> None:
    """Simulate `torch.cuda`, whose graphs note what is captured, and take some memory together."""
    free = iter((100 << 20, (100 - taken_mib) << 20))
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(
        capture_begin=lambda **_: calls.append("begin"), capture_end=lambda: calls.append("end"), replay=lambda: None
    )
    cuda = SimpleNamespace(
        empty_cache=lambda: None,
        mem_get_info=lambda: (next(free), 100 << 20),
        graph_pool_handle=lambda: None,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: nullcontext(),
        CUDAGraph=lambda: graph,
        get_sync_debug_mode=lambda: 0,
        set_sync_debug_mode=lambda mode: None,
    )
    monkeypatch.setattr(torch, "cuda", cuda)


def uncaptured(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    """Return graphs that note their steps when they are captured."""
    graphs = graphs_of(4, 64, 300)
    graphs.captured = {shape: [] for shape in graphs.captured}
    monkeypatch.setattr(graphs, "_forward", lambda *_: calls.append("forward") or torch.empty(0))
    return graphs


@pytest.mark.parametrize(("taken_mib", "warns"), [(10, False), (90, False), (91, True)])
def test_a_capture_warns_if_it_takes_more_memory_than_planned(
    taken_mib: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = list[str]()
    graphs = uncaptured(calls, monkeypatch)
    fake_cuda(monkeypatch, taken_mib, calls)
    with caplog.at_level("INFO"):
        assert capture_all(graphs, None, 90 << 20, lambda: None, SingleRank())
    assert calls == ["forward", "begin", "forward", "end"] * len(graphs.captured)
    assert f"they take {taken_mib} MiB of 90 planned" in caplog.text
    assert ("1 MiB more than planned" in caplog.text) == warns


@pytest.mark.parametrize("synchronizes", [False, True])
def test_steps_have_graphs_even_if_sampling_cannot_be_captured(
    synchronizes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, progress = list[str](), list[int]()
    config = SimpleNamespace(vocab_size=9, hidden_size=3, decoder=SimpleNamespace(embedding=SimpleNamespace(size=None)))
    logits: Any = SimpleNamespace(model=SimpleNamespace(config=config), ranks=SingleRank())
    sampling = SamplingGraphs(logits, 4, torch.bfloat16, torch.device("cpu"))

    def sample(hidden: torch.Tensor, parameters: torch.Tensor | None) -> torch.Tensor:
        if synchronizes and len(hidden) == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.empty(0)

    monkeypatch.setattr(sampling, "_sample", sample)
    graphs = uncaptured(calls, monkeypatch)
    fake_cuda(monkeypatch, 0, calls)
    with caplog.at_level("INFO"):
        assert capture_all(graphs, sampling, 90 << 20, lambda: progress.append(1), SingleRank())
    num_steps = sum(map(len, graphs.captured.values()))
    assert num_steps > 0
    assert ("CUDA graphs of sampling are disabled: the host would wait" in caplog.text) == synchronizes
    num_sampling = 0 if synchronizes else 3 * 2
    assert len(sampling.captured) == num_sampling
    assert f"captured {num_steps + num_sampling} CUDA graphs" in caplog.text
    assert len(progress) == num_steps + (2 if synchronizes else num_sampling)
    assert (sampling.find(3, draws=True) is None) == synchronizes


@pytest.mark.parametrize("failing", ["none", "steps of rank 1", "sampling of rank 3"])
def test_all_ranks_agree_on_steps_and_those_of_the_last_stage_on_sampling(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first stage were asked about sampling, or only a part of the ranks, some would wait forever."""
    fake_cuda(monkeypatch, 0, [])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    groups = thread_groups(RankLayout(tensor=2, pipeline=2))

    def graphs(name: str, ranks: Communicator) -> Any:
        def compute() -> torch.Tensor:
            if name == failing:
                raise RuntimeError("called a synchronizing CUDA operation")
            return torch.empty(0)

        captured: dict[int, list[Any]] = {}

        def capture(capture: Capture, _: Any) -> None:
            captured.update({number: [capture(compute)] for number in range(3)})

        return SimpleNamespace(captured=captured, capture=capture, ranks=ranks)

    def capture_on(rank: int) -> tuple[bool, int]:
        of_rank = groups[rank]
        sampling = graphs(f"sampling of rank {rank}", of_rank.tensor) if of_rank.pipeline.stage.is_last else None
        steps = graphs(f"steps of rank {rank}", of_rank.engine)
        found = capture_all(steps, sampling, 0, lambda: None, of_rank.engine)
        return found, len(sampling.captured) if sampling is not None else 0

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(capture_on, range(4), timeout=60))
    are_captured = [rank >= 2 and failing == "none" for rank in range(4)]
    assert found == [(not failing.startswith("steps"), 3 * is_captured) for is_captured in are_captured]
