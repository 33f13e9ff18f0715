"""Checks of arguments against a model's small files. The server runs them before it starts an engine: an engine finds
the same errors only after it has imported torch, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.generation_config import sampling_defaults
from stoker_engine.models.hub.locate import find_local_model
from stoker_engine.models.model_folder import read_folder
from stoker_engine.sizing.model_limits import refuse_parallel_sizes, refuse_too_long
from stoker_engine.sizing.weight_formats import ALL_NUMBERS


def check_local_model(args: EngineArgs) -> None:
    """Refuse arguments that do not fit a local MODEL, before any process of the engine starts.

    Raises:
        ModelError, ArgumentError: as the engine would raise them.
    """
    path = find_local_model(args)
    if path is not None and path.is_dir():
        check_folder(args, path)


def check_folder(args: EngineArgs, path: Path) -> None:
    """Refuse arguments that do not fit the model in a folder.

    Raises:
        ModelError, ArgumentError: as the engine would raise them.
    """
    folder = read_folder(path, args.quantization)
    sampling_defaults(args.generation_config, path)
    if folder.config is None:
        return
    if folder.quantization is None and folder.on_load is None:  # otherwise the shards depend on the device
        refuse_parallel_sizes(args, folder.config, lambda: ALL_NUMBERS)
    refuse_too_long(args.max_model_len, folder.config)
