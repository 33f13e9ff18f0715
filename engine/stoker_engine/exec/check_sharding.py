"""Checks that ranks can split a model, before any rank starts."""

from __future__ import annotations

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec.dtypes import resolve_dtype
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.parallel.device import resolve_device
from stoker_engine.sizing.model_limits import refuse_parallel_sizes
from stoker_engine.sizing.weight_formats import WeightFormats


def refuse_indivisible(args: EngineArgs, checkpoint: Checkpoint) -> None:
    """Check that the parallel sizes can split a checkpoint, as its weights are stored in memory.

    Raises:
        ArgumentError: they cannot; the message names the flag and the remedy.
    """

    def formats() -> WeightFormats:
        device = resolve_device(args)
        return checkpoint.weight_formats(resolve_dtype(args, checkpoint, device), device)

    refuse_parallel_sizes(args, checkpoint.config, formats)
