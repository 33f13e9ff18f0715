"""The dtype in which a model is computed, and the formats in which it is stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

from stoker_common.errors import ModelError
from stoker_engine.architectures.compute_dtype import compute_dtype, why_not_computed
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.checkpoint import Checkpoint


class StoredAs(NamedTuple):
    """Formats in which a model is computed and stored, for display.

    Attributes:
        dtype: dtype of activations and unquantized weights.
        weights: formats of matrices, with their quantization method.
        kv_cache_dtype: format of keys and values, by the names of ``--kv-cache-dtype``.
    """

    dtype: str
    weights: str
    kv_cache_dtype: str


def stored_as(args: EngineArgs, checkpoint: Checkpoint, device: torch.device | str) -> StoredAs:
    """Return the formats of the model in `args` on `device`."""
    device = torch.device(device)
    dtype = resolve_dtype(args, checkpoint, device)
    name = str(dtype).removeprefix("torch.")
    kv_cache_dtype = name if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    return StoredAs(name, checkpoint.weights_stored_as(dtype, device), kv_cache_dtype)


def resolve_dtype(args: EngineArgs, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and unquantized weights. ``--dtype auto`` is the checkpoint's own dtype, or
    another one if `device` has no kernels for it.

    Raises:
        ModelError: the checkpoint's dtype is not supported.
    """
    checkpoint_dtype = checkpoint.config.dtype.removeprefix("torch.")
    # Which matrices are quantized does not depend on the dtype passed here.
    quantized = checkpoint_dtype == "float16" and bool(checkpoint.weight_formats(torch.float16, device).names)
    name = compute_dtype(args.dtype, checkpoint_dtype, quantized=quantized, on_cpu=device.type == "cpu")
    if why := why_not_computed(name):
        raise ModelError(why)
    dtype: torch.dtype = getattr(torch, name)
    return dtype
