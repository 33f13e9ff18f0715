"""Decodes as CUDA graphs: the host launches a step's forward pass at once instead of kernel by kernel.

A graph is captured once for a number of sequences and a length, and replayed in all steps that fit:

    step            3 sequences of 200, 700 and 90 tokens
    graphs          for 1, 2, 4, 8 … sequences × 1,024, 4,096 … tokens of each
    replayed        4 × 1,024: the fourth sequence is padding

A graph reads and writes fixed addresses, so a step's inputs are copied there: the rows of its tokens, from which the
graph gathers token ids and positions, and the attention metadata. A padding sequence has no keys and stores none. With
LoRA each graph is captured twice: without adapters, and with any adapters.

The results are the same as without graphs, except that GEMM libraries may choose other kernels for the padded size, and
NCCL another order of summation.
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
from stoker_engine.exec.capture_agreement import Capture, CaptureError, agreed
from stoker_engine.exec.device_batch import DeviceBatch
from stoker_engine.exec.inputs import Inputs
from stoker_engine.exec.kv_cache import KVCachePlan
from stoker_engine.layers.batch_rows import PADDING, BatchRows
from stoker_engine.models.model import Model, StepInputs
from stoker_engine.parallel.communicator import Communicator

logger = logging.getLogger(__name__)

#: Numbers of sequences to capture.
_SIZES: Final = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024),
)
#: Tokens per sequence of the shortest graphs, and the factor from one length to the next.
_SHORTEST, _LONGER = 1024, 4


class StepShape(NamedTuple):
    """Shape of the steps that a graph is captured for.

    Attributes:
        tokens: number of tokens that each sequence computes.
        has_adapters: whether sequences may use adapters.
    """

    sequences: int
    tokens: int
    has_adapters: bool = False

    @classmethod
    def of(cls, step: Step, has_adapters: bool = False) -> StepShape | None:
        """Return the shape of a step; None: its sequences compute different numbers of tokens."""
        if step.num_decodes == len(step.rows):
            return cls(step.num_decodes, 1, has_adapters)
        lengths = set(step.lengths)
        return cls(len(step.rows), lengths.pop(), has_adapters) if len(lengths) == 1 else None


class GraphInputs:
    """Fixed addresses of a step's inputs, shared by all graphs: attention metadata and the rows of tokens. The graphs
    gather the other inputs from the per-row values on the device.

    Args:
        max_seqs: maximum number of sequences.
        max_blocks: maximum number of blocks per sequence and group.
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
        """Return the fixed tensor of the rows of `size` decodes, int64 [size]."""
        return self._token_rows[:size]

    def metadata(self, planned: np.ndarray) -> AttentionMetadata:
        """Return attention metadata of views of the fixed tensors; `planned`: lengths on the host, see
        `StepGraph.planned`."""
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
        """Copy a step's inputs to the fixed addresses."""
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
    """The captured forward pass of steps of one shape.

    Attributes:
        planned: int32 [sequences], length in tokens of each sequence for which attention was planned.
        hidden: [sequences, hidden], the hidden states that it writes.
        states: hidden states of inner layers that it writes, see `StepInputs.hidden_states`.
        received: [sequences, hidden], the previous stage's hidden states, which it reads; None: it is the first stage.
    """

    planned: np.ndarray
    inputs: GraphInputs
    hidden: torch.Tensor
    states: dict[int, torch.Tensor]
    replay: Callable[[], None]
    received: torch.Tensor | None

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.planned)

    def run(self, inputs: Inputs) -> torch.Tensor:
        """Run `Model.forward` on the inputs of `size` sequences: [size, hidden], valid until the next step."""
        self.inputs.fill(inputs)
        self.replay()
        return self.hidden


class StepGraphs:
    """All graphs of a model, for decodes only: no attention backend can capture other steps yet.

    Args:
        batch: the per-row values on the device, from which graphs gather.
        rows: the rows that the model's operations read, see `layers.build.Build.rows`.
        max_seqs: maximum number of sequences in a step.
        max_blocks: maximum number of blocks per sequence.
        has_adapters: whether to capture graphs with adapters, too.
        received: [max_seqs, hidden], where all graphs read the previous stage's hidden states; None: it is the first
            stage.

    Attributes:
        captured: graphs by shape; of each shape, the graphs for shorter sequences come first.
    """

    def __init__(
        self, model: Model, plan: KVCachePlan, caches: list[KVCache], batch: DeviceBatch, rows: BatchRows,
        max_seqs: int, max_blocks: int, device: torch.device, has_adapters: bool = False,
        received: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        backend = model.backend
        assert captures_decodes(backend)
        self._model, self._backend, self._plan, self._caches = model, backend, plan, caches
        self._batch, self._rows, self._received = batch, rows, received
        sizes = _sizes(max_seqs)
        kinds = (False, True) if has_adapters else (False,)
        self.captured: dict[StepShape, list[StepGraph]] = {
            StepShape(size, 1, kind): [] for size in sizes for kind in kinds
        }
        self._inputs = GraphInputs(max(sizes), max_blocks, plan, device)

    def capture(self, capture: Capture, on_captured: Callable[[], None] = lambda: None) -> None:
        """Capture all graphs, those that need the most memory first."""
        for shape in sorted(self.captured, reverse=True):
            for planned in self._plans(shape.sequences):
                states: dict[int, torch.Tensor] = {}
                received = None if self._received is None else self._received[: shape.sequences]
                hidden, replay = capture(partial(self._forward, planned, states, shape.has_adapters, received))
                self.captured[shape].insert(0, StepGraph(planned, self._inputs, hidden, states, replay, received))
                on_captured()

    def find(self, step: Step, has_adapters: bool = False) -> StepGraph | None:
        """Return the smallest graph that fits a step. None: no graph fits, or the step uses adapters and experts may
        have adapters, for which the host waits.

        Args:
            has_adapters: whether a sequence of the step uses an adapter.
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
        """Return the lengths to capture for `size` sequences, the shortest last, without lengths that the plan for a
        shorter one covers. The sequences' total length is limited to about twice the cache's tokens: only shared
        prefixes allow more than the cache's tokens."""
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

    def _forward(
        self, planned: np.ndarray, states: dict[int, torch.Tensor], has_adapters: bool, received: torch.Tensor | None
    ) -> torch.Tensor:
        token_rows = self._inputs.token_rows(len(planned))
        self._rows.begin(token_rows, has_adapters=has_adapters)
        token_ids, positions = self._batch.gather(token_rows)
        attention = self._backend.prepare(self._inputs.metadata(planned))
        inputs = StepInputs(token_ids, positions, attention, self._caches, hidden_states=states)
        return self._model.forward(inputs, received)


def _has_room(captured: StepShape, shape: StepShape) -> bool:
    return captured[1:] == shape[1:] and captured.sequences >= shape.sequences


def capture_all(graphs: StepGraphs, on_progress: Callable[[], None], ranks: Communicator) -> bool:
    """Capture all graphs on the current GPU, which takes seconds.

    Args:
        ranks: the ranks that share the model, all of which call this.

    Returns:
        Whether they were captured; False: the model's forward pass synchronizes with the device, or one of several
        ranks could not capture a graph.
    """
    started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def capture(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        with torch.cuda.stream(stream):
            with _forbid_sync():
                compute()  # libraries load kernels at their first launch, which is not allowed in a capture
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                hidden = compute()
            finally:
                graph.capture_end()
        return hidden, graph.replay

    try:
        graphs.capture(capture if ranks.size == 1 else agreed(capture, ranks), on_progress)
    except CaptureError as error:
        logger.warning("CUDA graphs are disabled for decodes: %s", error)
        return False
    torch.cuda.current_stream().wait_stream(stream)
    count = sum(map(len, graphs.captured.values()))
    mebibytes = (free - torch.cuda.mem_get_info()[0]) / (1 << 20)
    logger.info("captured %d CUDA graphs in %.1f s; they take %.0f MiB", count, time.monotonic() - started, mebibytes)
    return True


class _SyncError(CaptureError):
    """The host would have waited for the device."""


@contextmanager
def _forbid_sync() -> Iterator[None]:
    """Raise `_SyncError` if the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the mode does not detect all synchronizations yet
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise _SyncError(f"the model synchronizes with the GPU ({reason})") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _sizes(max_seqs: int) -> list[int]:
    """Numbers of sequences to capture, up to `max_seqs` itself or the largest of `_SIZES`."""
    return sorted({size for size in _SIZES if size < max_seqs} | {min(max_seqs, _SIZES[-1])})
