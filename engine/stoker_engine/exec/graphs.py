"""Steps as CUDA graphs: the host launches a step's forward pass at once instead of kernel by kernel.

A graph is captured once for a shape (`sizing.step_shapes`) and a length of decodes, and replayed in all steps that fit:

    step            3 decodes of sequences of 200, 700 and 90 tokens, a chunk of 40 tokens
    graphs          for 8, 16, 32, 64 … tokens × decodes of 1,024 tokens, and of the longest
    replayed        64 × 1,024: the last 21 tokens are padding

A graph reads and writes fixed addresses, so a step's inputs are copied there: the rows of its tokens, from which the
graph gathers token ids and positions, and the attention metadata (`exec.graph_inputs`). Padding has no keys and stores
none. With LoRA each graph is captured twice: without adapters, and with any adapters.

The results are the same as without graphs, except that GEMM libraries may choose other kernels for the padded size, and
NCCL another order of summation. Sampling has graphs of its own (`exec.finish.sampling_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from stoker_engine.attention.backend import KVCache, captures_steps
from stoker_engine.core.step import Step
from stoker_engine.exec.capture_agreement import Capture
from stoker_engine.exec.device_batch import DeviceBatch
from stoker_engine.exec.graph_inputs import GraphInputs
from stoker_engine.exec.inputs import Inputs
from stoker_engine.exec.kv_cache import KVCachePlan
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.models.model import Model, StepInputs
from stoker_engine.sizing.step_shapes import StepShape, captured_shapes, planned_lengths


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The captured forward pass of steps of one shape.

    Attributes:
        planned: int32 [sequences], length in tokens of each decode for which attention was planned.
        hidden: [tokens, hidden], the hidden states that it writes; all graphs write to the same address.
        states: hidden states of inner layers that it writes, see `StepInputs.hidden_states`.
        received: [tokens, hidden], the previous stage's hidden states, which it reads; None: it is the first stage.
    """

    shape: StepShape
    planned: np.ndarray
    inputs: GraphInputs
    hidden: torch.Tensor
    states: dict[int, torch.Tensor]
    replay: Callable[[], None]
    received: torch.Tensor | None

    def run(self, inputs: Inputs) -> torch.Tensor:
        """Run `Model.forward` on inputs that are padded to the shape: [tokens, hidden], valid until the next step."""
        self.inputs.fill(inputs)
        self.replay()
        return self.hidden


class StepGraphs:
    """All graphs of a model.

    Args:
        batch: the per-row values on the device, from which graphs gather.
        rows: the rows that the model's operations read, see `layers.build.Build.rows`.
        max_seqs: maximum number of sequences in a step.
        max_blocks: maximum number of blocks per sequence.
        has_adapters: whether to capture graphs with adapters, too.
        receives: dtype of the hidden states that this stage receives from the previous one, which all graphs read at
            the same address; None: it is the first stage.

    Attributes:
        captured: graphs by shape; of each shape, the graphs for shorter sequences come first.
    """

    def __init__(
        self, model: Model, plan: KVCachePlan, caches: list[KVCache], batch: DeviceBatch, rows: BatchRows,
        max_seqs: int, max_blocks: int, device: torch.device, has_adapters: bool = False,
        receives: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        backend = model.backend
        assert captures_steps(backend)
        self._model, self._backend, self._plan, self._caches = model, backend, plan, caches
        self._batch, self._rows = batch, rows
        shapes = captured_shapes(max_seqs, plan.step_tokens, has_adapters)
        self.captured: dict[StepShape, list[StepGraph]] = {shape: [] for shape in shapes}
        self._inputs = GraphInputs(shapes, max_blocks, plan, device)
        self._hidden: torch.Tensor | None = None
        self._received: torch.Tensor | None = None
        if receives is not None:
            tokens = max(shape.tokens for shape in shapes)
            self._received = torch.zeros(tokens, model.config.hidden_size, dtype=receives, device=device)

    def capture(self, capture: Capture, on_captured: Callable[[], None] = lambda: None) -> None:
        """Capture all graphs, those that need the most memory first."""
        for shape, graphs in self.captured.items():
            self._inputs.clear(shape)
            for planned in self._plans(shape):
                states: dict[int, torch.Tensor] = {}
                received = None if self._received is None else self._received[: shape.tokens]
                hidden, replay = capture(partial(self._forward, shape, planned, states, received))
                graphs.insert(0, StepGraph(shape, planned, self._inputs, hidden, states, replay, received))
                on_captured()

    def find(self, step: Step, has_adapters: bool = False) -> StepGraph | None:
        """Return the smallest graph that fits a step. None: no graph fits, or the step uses adapters and experts may
        have adapters, for which the host waits.

        Args:
            has_adapters: whether a sequence of the step uses an adapter.
        """
        if has_adapters and self._rows.extends_experts:
            return None
        of_step = StepShape(step.num_tokens, len(step.rows), step.num_decodes < len(step.rows), has_adapters)
        shapes = [each for each in self.captured if each.has_room(of_step)]
        if not shapes:
            return None
        smallest = min(shapes)
        seq_lens = np.zeros(smallest.sequences, dtype=np.int32)
        seq_lens[: step.num_decodes] = np.array(step.starts[: step.num_decodes], dtype=np.int32) + 1
        return next((each for each in self.captured[smallest] if self._backend.fits(seq_lens, each.planned)), None)

    def _plans(self, shape: StepShape) -> list[np.ndarray]:
        """Return the lengths to capture for a shape, the shortest last, without lengths that the plan for a shorter one
        covers."""
        plans: list[np.ndarray] = []
        cache_tokens = self._plan.num_blocks * self._plan.block_size
        for length in planned_lengths(shape, cache_tokens, self._plan.max_model_len):
            planned = np.full(shape.sequences, length, dtype=np.int32)
            if not plans or not self._backend.fits(planned, plans[0]):
                plans.insert(0, planned)
        return plans

    def _forward(
        self, shape: StepShape, planned: np.ndarray, states: dict[int, torch.Tensor], received: torch.Tensor | None
    ) -> torch.Tensor:
        token_rows = self._inputs.token_rows(shape)
        self._rows.begin(token_rows, has_adapters=shape.has_adapters)
        token_ids, positions = self._batch.gather(token_rows, *self._inputs.ungathered(shape))
        attention = self._backend.prepare(self._inputs.metadata(shape, planned))
        inputs = StepInputs(token_ids, positions, attention, self._caches, hidden_states=states)
        hidden = self._model.forward(inputs, received)
        if self._hidden is None:  # the first step is the largest, and runs once before it is captured
            self._hidden = torch.empty_like(hidden)
        return self._hidden[: shape.tokens].copy_(hidden)
