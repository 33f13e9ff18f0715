"""Decodes as CUDA graphs: the host launches a step's forward at once instead of kernel by kernel.

A graph is captured once, for a number of sequences and a length, and replayed in all steps that have room in it:

    step            3 sequences of 200, 700 and 90 tokens
    graphs          for 1, 2, 4, 8 … sequences × 1,024, 4,096 … tokens of each
    replayed        4 × 1,024: the fourth sequence is padding

What the graphs read and write lies at the same place in every step, so a step's inputs are copied there: the rows of
its tokens, by which the graph gathers token ids and positions, and what attention needs. A padding sequence has no
keys, and stores none. Where LoRA is on, each is captured twice: without adapters, and with what they add,
whichever they are.

What is computed is the same; which of its kernels a library of products takes for as many rows is the library's choice.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch

from stoker_engine.attention.backend import KVCache, captures_decodes
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.core.step import Step
from stoker_engine.exec.device_batch import DeviceBatch
from stoker_engine.exec.inputs import Inputs
from stoker_engine.exec.kv_cache import KVCachePlan
from stoker_engine.layers.batch_rows import PADDING, BatchRows
from stoker_engine.models.model import Model, StepInputs

logger = logging.getLogger(__name__)

#: Numbers of sequences.
_SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
#: Tokens of each sequence, in the graphs for the shortest ones, and how many times as many those for the next have.
_SHORTEST, _LONGER = 1024, 4

#: Computes into memory that stays where it is → where the result is, and what computes it again.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]


class StepShape(NamedTuple):
    """What a graph is captured for.

    Attributes:
        sequences: how many there are.
        tokens: that each of them computes.
        has_adapters: whether some of them may have an adapter.
    """

    sequences: int
    tokens: int
    has_adapters: bool = False

    @classmethod
    def of(cls, step: Step, has_adapters: bool = False) -> StepShape | None:
        """The shape of a step; None: its sequences compute different numbers of tokens."""
        if step.num_decodes == len(step.rows):
            return cls(step.num_decodes, 1, has_adapters)
        lengths = set(step.lengths)
        return cls(len(step.rows), lengths.pop(), has_adapters) if len(lengths) == 1 else None


class GraphInputs:
    """Where all graphs read a step's inputs: those of its sequences, and the rows of its tokens. The rest they gather
    from what the device keeps of these rows.

    Args:
        max_seqs: sequences that there is room for.
        max_blocks: of each of them, in every group.
    """

    def __init__(self, max_seqs: int, max_blocks: int, plan: KVCachePlan, device: torch.device) -> None:
        self._plan = plan

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_rows = zeros(max_seqs) + PADDING
        self._seq_lens = zeros(max_seqs, dtype=torch.int32)
        self._query_starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self._tables = [zeros(max_seqs, max_blocks, dtype=torch.int32) for _ in plan.groups]
        self._slots = [zeros(max_seqs) - 1 for _ in plan.groups]

    def token_rows(self, size: int) -> torch.Tensor:
        """The rows of as many decodes."""
        return self._token_rows[:size]

    def metadata(self, planned: np.ndarray) -> AttentionMetadata:
        """What attention knows of as many decodes as there are lengths."""
        size = len(planned)
        groups = [
            BlockTables(tables[:size], slots[:size], group.sliding_window, group.kind)
            for tables, slots, group in zip(self._tables, self._slots, self._plan.groups, strict=True)
        ]
        return AttentionMetadata(
            query_starts=self._query_starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            num_decodes=size,
            block_size=self._plan.block_size,
            groups=groups,
            query_starts_host=np.arange(size + 1, dtype=np.int32),
            seq_lens_host=planned,
        )

    def fill(self, inputs: Inputs) -> None:
        """Copies a step's inputs."""
        size, groups = len(inputs.token_rows), inputs.metadata.groups
        torch._foreach_copy_(
            [self._token_rows[:size], *(slots[:size] for slots in self._slots)],
            [inputs.token_rows, *(group.slot_mapping for group in groups)],
        )
        self._seq_lens[:size].copy_(inputs.metadata.seq_lens)
        for tables, group in zip(self._tables, groups, strict=True):
            tables[:size, : group.tables.shape[1]].copy_(group.tables)


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The forward of steps of one shape.

    Attributes:
        planned: [sequences] tokens of each that it has room for.
        inputs: what it reads.
        hidden: [sequences, hidden], which it writes.
        states: so does it these, see `StepInputs.hidden_states`.
    """

    planned: np.ndarray
    inputs: GraphInputs
    hidden: torch.Tensor
    states: dict[int, torch.Tensor]
    replay: Callable[[], None]

    @property
    def size(self) -> int:
        """Of how many sequences."""
        return len(self.planned)

    def run(self, inputs: Inputs) -> torch.Tensor:
        """`Model.forward` of a step's inputs, of `size` sequences: [size, hidden], valid until the next step."""
        self.inputs.fill(inputs)
        self.replay()
        return self.hidden


class StepGraphs:
    """All graphs of a model: of decodes, until there is attention whose plan of longer steps can be captured.

    Args:
        batch: what the device keeps of the rows, from which graphs gather.
        rows: the rows that the model's operations read, see `layers.build.Build.rows`.
        max_seqs: sequences of a step.
        max_blocks: of a sequence.
        has_adapters: whether there are graphs of steps with adapters, too.

    Attributes:
        captured: by shape, those for shorter sequences first.
    """

    def __init__(
        self, model: Model, plan: KVCachePlan, caches: list[KVCache], batch: DeviceBatch, rows: BatchRows,
        max_seqs: int, max_blocks: int, device: torch.device, has_adapters: bool = False,
    ) -> None:  # fmt: skip
        backend = model.backend
        assert captures_decodes(backend)
        self._model, self._backend, self._plan, self._caches = model, backend, plan, caches
        self._batch, self._rows = batch, rows
        sizes = _sizes(max_seqs)
        kinds = (False, True) if has_adapters else (False,)
        self.captured: dict[StepShape, list[StepGraph]] = {
            StepShape(size, 1, kind): [] for size in sizes for kind in kinds
        }
        self._inputs = GraphInputs(max(sizes), max_blocks, plan, device)

    def capture(self, capture: Capture, on_captured: Callable[[], None] = lambda: None) -> None:
        """Captures all of them, those that take most memory first."""
        for shape in sorted(self.captured, reverse=True):
            for planned in self._plans(shape.sequences):
                states: dict[int, torch.Tensor] = {}
                hidden, replay = capture(partial(self._forward, planned, states, shape.has_adapters))
                self.captured[shape].insert(0, StepGraph(planned, self._inputs, hidden, states, replay))
                on_captured()

    def find(self, step: Step, has_adapters: bool = False) -> StepGraph | None:
        """The smallest one that has room for a step; None: there is none of its shape, or experts are computed one by
        one, for which the host waits.

        Args:
            has_adapters: whether a row of the step has an adapter.
        """
        if has_adapters and self._rows.extends_experts:
            return None
        shape = StepShape.of(step, has_adapters)
        shapes = [] if shape is None else [each for each in self.captured if _has_room(each, shape)]
        if shape is None or not shapes:
            return None
        shortest = min(shapes)
        seq_lens = np.zeros(shortest.sequences, dtype=np.int32)
        seq_lens[: shape.sequences] = np.array(step.starts, dtype=np.int32) + shape.tokens
        return next((each for each in self.captured[shortest] if self._backend.fits(seq_lens, each.planned)), None)

    def _plans(self, size: int) -> list[np.ndarray]:
        """Lengths of that many sequences, the longest first, but for what a shorter plan has room for. No longer than
        fill the cache twice: what is beyond that is prefixes that many share."""
        tokens = 2 * self._plan.num_blocks * self._plan.block_size
        longest = min(self._plan.max_model_len, -(-tokens // size))
        plans: list[np.ndarray] = []
        length = _SHORTEST
        while True:
            planned = np.full(size, min(length, longest), dtype=np.int32)
            if not plans or not self._backend.fits(planned, plans[0]):
                plans.insert(0, planned)
            if length >= longest:
                return plans
            length *= _LONGER

    def _forward(self, planned: np.ndarray, states: dict[int, torch.Tensor], has_adapters: bool) -> torch.Tensor:
        token_rows = self._inputs.token_rows(len(planned))
        self._rows.begin(token_rows, has_adapters=has_adapters)
        token_ids, positions = self._batch.gather(token_rows)
        attention = self._backend.prepare(self._inputs.metadata(planned))
        inputs = StepInputs(token_ids, positions, attention, self._caches, hidden_states=states)
        return self._model.forward(inputs)


def _has_room(captured: StepShape, shape: StepShape) -> bool:
    return captured[1:] == shape[1:] and captured.sequences >= shape.sequences


def capture_all(graphs: StepGraphs, on_progress: Callable[[], None]) -> bool:
    """Captures on the current GPU; takes seconds.

    Returns:
        Whether they were captured: a model that has the host read from the device in its forward cannot be.
    """
    started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def capture(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        with torch.cuda.stream(stream):
            with _forbid_sync():
                compute()  # a library's kernels are loaded when they are first launched, which no capture may do
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                hidden = compute()
            finally:
                graph.capture_end()
        return hidden, graph.replay

    try:
        graphs.capture(capture, on_progress)
    except _SyncError as error:
        logger.warning("decodes run without CUDA graphs, kernel by kernel: the model waits for the GPU (%s)", error)
        return False
    torch.cuda.current_stream().wait_stream(stream)
    count = sum(map(len, graphs.captured.values()))
    mebibytes = (free - torch.cuda.mem_get_info()[0]) / (1 << 20)
    logger.info("captured %d CUDA graphs in %.1f s; they take %.0f MiB", count, time.monotonic() - started, mebibytes)
    return True


class _SyncError(Exception):
    """The host would have waited for the device."""


@contextmanager
def _forbid_sync() -> Iterator[None]:
    """Raises `_SyncError` where the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the mode does not yet find all that wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise _SyncError(str(error).partition("\n")[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _sizes(max_seqs: int) -> list[int]:
    """Numbers of sequences that there are graphs for; `max_seqs` is one of them, unless it is beyond the largest."""
    return sorted({size for size in _SIZES if size < max_seqs} | {min(max_seqs, _SIZES[-1])})
