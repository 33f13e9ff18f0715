"""Steps as on a GPU, on a CPU: a step is launched before the previous one is collected."""

from __future__ import annotations

from dataclasses import replace

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.proposer import Proposer
from stoker_engine.engine import Engine
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.exec.finish.sample import Sampling
from stoker_engine.exec.runner import Runner
from stoker_engine.models.checkpoint import find_checkpoint


def sample_on_device(runner: Runner) -> None:
    """Keep sampled tokens in the values that belong to the device. The host knows them once it collects a step."""
    runner.inputs = replace(runner.inputs, gathers=True)
    if isinstance(runner.finish, Sampling) and runner.finish.keeps_sampled:
        runner.finish = replace(runner.finish, device_batch=runner.inputs.device_batch)


def engine_on_device(args: EngineArgs, proposer: Proposer | None = None) -> Engine:
    """Return an engine with two steps in flight."""
    checkpoint = find_checkpoint(args)
    runner = build_runner(args, checkpoint)
    sample_on_device(runner)
    executor = LocalExecutor(runner)
    return Engine(replace(args, async_scheduling=True), checkpoint, executor=executor, proposer=proposer)
