"""Runs the steps of a model on a device: prepare → forward → finish → collect.

    prepare    apply the step's changes to the input batch, build the input tensors, find a matching graph
    forward    compute this stage's part of the model
    finish     process the hidden states (`exec.finish`): sample, or send them to the next stage
    collect    wait for the device, and write sampled tokens into the rows

On an accelerator the host only enqueues the first three. The next step can be launched before the previous one is
collected, whose sampled tokens are already on the device (`exec.device_batch`). `exec.build_runner` builds a runner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from stoker_engine.core.step import Step, StepResult
from stoker_engine.exec.adapters import Adapters
from stoker_engine.exec.finish.finish import Finish, PendingResult, StepFinish
from stoker_engine.exec.graphs import StepGraph, StepGraphs
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import InputBuilder, Inputs
from stoker_engine.exec.kv_cache import KVCachePlan, KVCachePool
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.models.model import Model, StepInputs
from stoker_engine.parallel.device import torch_threads
from stoker_engine.parallel.rank_groups import Pipeline


@dataclass(frozen=True)
class _Prepared:
    """A step that is ready to run.

    Attributes:
        graph: the graph that computes it; None: the step runs kernel by kernel, from `inputs`.
    """

    inputs: Inputs
    finish: StepFinish
    graph: StepGraph | None


@dataclass(frozen=True)
class _Launched:
    """A step in flight, which was prepared from `started` to `ready` (monotonic times)."""

    pending: PendingResult
    started: float
    ready: float


@dataclass(eq=False)
class Runner:
    """One model on one device.

    Attributes:
        dtype: dtype of activations.
        plan: size of the KV cache.
        batch: the running sequences.
        rows: rows of the batch in the form that the model's operations read.
        pipeline: the previous and next stages.
        graphs: captured graphs; None: every step runs kernel by kernel.
        adapters: the LoRA adapters; None: LoRA is off.
        num_torch_threads: number of threads for torch's operators; None: torch's current setting.
        runs_ahead: whether `launch` does not wait for the device.
    """

    device: torch.device
    dtype: torch.dtype
    plan: KVCachePlan
    model: Model
    pool: KVCachePool
    batch: InputBatch
    inputs: InputBuilder
    rows: BatchRows
    finish: Finish
    grammars: Grammars
    pipeline: Pipeline
    graphs: StepGraphs | None = None
    adapters: Adapters | None = None
    num_torch_threads: int | None = None
    runs_ahead: bool = False
    _in_flight: deque[_Launched] = field(default_factory=deque)
    _collected: float = 0.0  # monotonic time at which the last step was collected

    def run(self, step: Step) -> StepResult:
        """Run a step. With a single stage, sampled tokens are also written into the rows. Only the rank with
        `RankGroups.samples` returns complete results."""
        self.launch(step)
        return self.collect()

    def launch(self, step: Step) -> None:
        """Start a step. It may continue a sequence of a step in flight only if that step's sampled tokens are on the
        device (`Sampling.device_batch`)."""
        with self._mode():
            if self._in_flight:
                self._in_flight[0].pending.resume()
            started = time.monotonic()
            prepared = self._prepare(step)
            ready = time.monotonic()
            hidden, states = self._forward(step, prepared)
            self._in_flight.append(_Launched(prepared.finish.finish(hidden, states), started, ready))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight, and return its result; see `run`."""
        launched = self._in_flight.popleft()
        with self._mode():
            launched.pending.resume()
            result = launched.pending.collect()
            collected = time.monotonic()
            if self._in_flight:
                self._in_flight[0].pending.before_resume()
        # With several steps in flight, sampling may have been started before the previous step was collected.
        model_time = max(0.0, collected - max(launched.ready, self._collected) - result.sample_time)
        self._collected = collected
        times = launched.ready - launched.started, model_time, result.sample_time
        return StepResult(result.sampled, result.prompt_logprobs, *times, result.pooled)

    def discard_in_flight(self) -> None:
        """Discard the steps in flight. All sequences must then be started again."""
        self._in_flight.clear()
        self.batch.discard_in_flight()

    @contextmanager
    def _mode(self) -> Iterator[None]:
        with torch.inference_mode(), torch_threads(self.num_torch_threads):
            yield

    def _prepare(self, step: Step) -> _Prepared:
        if self.adapters is not None:
            for slot, number in step.adapters:
                self.adapters.activate(slot, number)
        self.batch.apply(step)
        for draft in step.drafts:
            end = step.starts[draft.batch_index] + step.lengths[draft.batch_index]
            self.batch.token_ids[step.rows[draft.batch_index], end - len(draft.token_ids) : end] = draft.token_ids
        self.pool.copy(step.copies)
        has_adapters = self.adapters is not None and self.batch.has_adapters(step)
        graph = self.graphs.find(step, has_adapters) if self.graphs is not None else None
        inputs = self.inputs.build(step, graph.shape if graph is not None else None)
        finish = self.finish.begin(step, inputs)
        self.rows.begin(inputs.token_rows, finish.kept if graph is None else None, has_adapters)
        return _Prepared(inputs, finish, graph)

    def _forward(self, step: Step, prepared: _Prepared) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Compute this stage's part: the hidden states of `Model.forward`, and the hidden states of inner layers, see
        `StepInputs.hidden_states`."""
        inputs, graph = prepared.inputs, prepared.graph
        if graph is not None:
            count = step.num_tokens
            if graph.received is not None:
                self.pipeline.receive(graph.received[:count])
            hidden = graph.run(inputs)[:count]
            if not self.pipeline.stage.is_last:
                hidden = hidden.clone()  # it may still be on its way to the next stage when the graph runs again
            return hidden, {layer: state[:count] for layer, state in graph.states.items()}
        plan = self.model.backend.prepare(inputs.metadata)
        step_inputs = StepInputs(inputs.token_ids, inputs.positions, plan, self.pool.caches, prepared.finish.kept)
        if self.pipeline.stage.is_first:
            return self.model.forward(step_inputs), step_inputs.hidden_states
        shape = len(inputs.token_ids), self.model.config.hidden_size
        received = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.pipeline.receive(received)
        return self.model.forward(step_inputs, received), step_inputs.hidden_states
