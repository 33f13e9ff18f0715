"""Steps as on a GPU, on a CPU: a step is launched before the previous one is collected, and graphs are replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.proposer import Proposer
from stoker_engine.engine import Engine
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.exec.finish.sample import Sampling
from stoker_engine.exec.finish.sampling_graphs import SamplingGraph, SamplingGraphs
from stoker_engine.exec.runner import Runner
from stoker_engine.models.checkpoint import find_checkpoint


def sample_on_device(runner: Runner) -> None:
    """Keep sampled tokens in the values that belong to the device. The host knows them once it collects a step."""
    runner.inputs = replace(runner.inputs, gathers=True)
    if isinstance(runner.finish, Sampling) and runner.finish.keeps_sampled:
        runner.finish = replace(runner.finish, device_batch=runner.inputs.device_batch)


def replayed(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Simulate a graph's replay by computing again. The batch has the rows of the capture."""
    found = compute()

    def replay() -> None:
        found.copy_(compute())

    return found, replay


class SampledRows(NamedTuple):
    """Rows of logits that a graph samples, and whether it draws."""

    rows: int
    in_graph: int
    draws: bool


def sample_by_graphs(runner: Runner) -> list[SampledRows]:
    """Sample by graphs from now on. Returns the steps that they sample. Padding that no step has written is NaN."""
    assert isinstance(runner.finish, Sampling)
    draws = runner.finish.draws
    graphs = SamplingGraphs(draws.logits, runner.plan.max_num_seqs, runner.dtype, runner.device)
    graphs._hidden.fill_(torch.nan)
    with torch.inference_mode():
        graphs.capture(replayed)
    runner.finish = replace(runner.finish, draws=replace(draws, graphs=graphs))
    return note_sampled(runner)


def note_sampled(runner: Runner) -> list[SampledRows]:
    """Return the steps that graphs sample from now on."""
    assert isinstance(runner.finish, Sampling)
    graphs = runner.finish.draws.graphs
    assert graphs is not None
    find, sampled = graphs.find, list[SampledRows]()

    def noted(num_rows: int, draws: bool) -> SamplingGraph | None:
        graph = find(num_rows, draws)
        if graph is not None:
            sampled.append(SampledRows(num_rows, len(graph.hidden), draws))
        return graph

    graphs.find = noted  # type: ignore[method-assign]
    return sampled


def engine_on_device(args: EngineArgs, proposer: Proposer | None = None) -> Engine:
    """Return an engine with two steps in flight."""
    checkpoint = find_checkpoint(args)
    runner = build_runner(args, checkpoint)
    sample_on_device(runner)
    executor = LocalExecutor(runner)
    return Engine(replace(args, async_scheduling=True), checkpoint, executor=executor, proposer=proposer)
