"""Arguments that a model does not permit. `sizing.sharding` has the rules of parallel sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.sizing.sharding import objection, tensor_sizes
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats

#: Flag that causes a problem, for some values of `sizing.sharding.Objection.reason`.
_FLAGS: Final = {"TooFewLayers": "--pipeline-parallel-size", "NotMixtureOfExperts": "--enable-expert-parallel"}


def refuse_parallel_sizes(args: EngineArgs, config: ModelConfig, formats_of: Callable[[], WeightFormats]) -> None:
    """Check that the parallel sizes can split the model.

    Args:
        formats_of: returns the formats of the weights in memory; called only if they matter.

    Raises:
        ArgumentError: they cannot; the message names the flag and the remedy.
    """
    tensor, pipeline, whole = args.tensor_parallel_size, args.pipeline_parallel_size, args.enable_expert_parallel
    problem, formats = objection(config, tensor, pipeline, whole_experts=whole), ALL_NUMBERS
    if tensor > 1 and config.num_weights is None and (problem is None or problem.reason not in _FLAGS):
        formats = formats_of()
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


def refuse_too_long(max_model_len: int | None, config: ModelConfig) -> None:
    """Check a value of ``--max-model-len``; None: the flag is not given.

    Raises:
        ModelError: it exceeds the model's own limit.
    """
    if max_model_len is not None and max_model_len > config.longest_model_len:
        raise ModelError(f"--max-model-len {max_model_len} exceeds the model's limit of {config.longest_model_len}")
