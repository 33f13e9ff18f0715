"""Checks that ranks can split a model, before any rank starts. `sizing.sharding` has the rules."""

from __future__ import annotations

from typing import Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec.dtypes import resolve_dtype
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.parallel.device import resolve_device
from stoker_engine.sizing.sharding import objection, tensor_sizes
from stoker_engine.sizing.weight_formats import ALL_NUMBERS

#: Flag that causes a problem, for some values of `sizing.sharding.Objection.reason`.
_FLAGS: Final = {"TooFewLayers": "--pipeline-parallel-size", "NotMixtureOfExperts": "--enable-expert-parallel"}


def refuse_indivisible(args: EngineArgs, checkpoint: Checkpoint) -> None:
    """Check that the parallel sizes can split the model.

    Raises:
        ArgumentError: they cannot; the message names the flag and the remedy.
    """
    config, tensor, pipeline = checkpoint.config, args.tensor_parallel_size, args.pipeline_parallel_size
    whole = args.enable_expert_parallel
    problem, formats = objection(config, tensor, pipeline, whole_experts=whole), ALL_NUMBERS
    if tensor > 1 and config.num_weights is None and (problem is None or problem.reason not in _FLAGS):
        device = resolve_device(args)
        formats = checkpoint.weight_formats(resolve_dtype(args, checkpoint, device), device)
        problem = objection(config, tensor, pipeline, whole_experts=whole, formats=formats)
    if problem is None:
        return
    flag = _FLAGS.get(problem.reason, "--tensor-parallel-size")
    if problem.reason == "NotMixtureOfExperts":
        remedy = "leave it out"
    elif problem.reason == "TooFewLayers":
        remedy = f"use at most {len(config.layers)}"
    elif problem.reason == "NotSplit":
        stated = {
            "--tensor-parallel-size": tensor > 1,
            "--pipeline-parallel-size": pipeline > 1,
            "--enable-expert-parallel": whole,
        }
        flag, *more_flags = (name for name, is_stated in stated.items() if is_stated)
        remedy = " and ".join(["leave it out", *more_flags])
    else:
        sizes = [str(size) for size in tensor_sizes(config, tensor, whole_experts=whole, formats=formats)]
        remedy = f"use {' or '.join(sizes)}"
    raise ArgumentError(flag, f"{problem.message}; {remedy}")
