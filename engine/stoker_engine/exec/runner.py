"""Loads the model onto the device and runs batches there."""

from __future__ import annotations

import logging
import time

import torch

from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract import names
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import ModelError
from stoker_engine.contract.model_config import ModelConfig
from stoker_engine.core.batch import ScheduledBatch
from stoker_engine.exec.inputs import InputBuilder
from stoker_engine.exec.kv_cache import allocate_kv_cache, plan_kv_cache
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.weights import load_weights
from stoker_engine.parallel.device import limit_threads, resolve_device
from stoker_engine.sampling.sampler import sample

logger = logging.getLogger(__name__)


class Runner:
    """One model on one device.

    Attributes:
        num_blocks: blocks in the KV cache.
        max_model_len: longest sequence, prompt and output.

    Raises:
        ArgumentError: the device or dtype cannot be had.
        ModelError: the weights do not match, or the model does not fit.
    """

    def __init__(self, args: EngineArgs, checkpoint: Checkpoint) -> None:
        self.device = resolve_device(args)
        if self.device.type == "cpu":
            limit_threads()
        self.config = checkpoint.config
        self.dtype = resolve_dtype(args, self.config)
        self.num_blocks, self.max_model_len = plan_kv_cache(args, self.config, self.dtype, self.device)
        started = time.monotonic()
        with torch.inference_mode():
            self.model = Decoder(self.config, checkpoint.family, SdpaBackend(), self.dtype)
            load_weights(self.model, checkpoint.weights, checkpoint.spelling)
            self.model.to(self.device)
            self.model.rotary.to_device(self.device)
            self.caches = allocate_kv_cache(self.config, self.num_blocks, args.block_size, self.dtype, self.device)
        logger.info("loaded %s on %s in %.1f s", self.dtype, self.device, time.monotonic() - started)
        self._inputs = InputBuilder(
            block_size=args.block_size,
            windows=frozenset(layer.sliding_window for layer in self.config.layers),
            device=self.device,
        )

    def run(self, batch: ScheduledBatch) -> list[int]:
        """Computes the batch and samples one token for each of ``batch.sampling``, in order."""
        with torch.inference_mode():
            inputs = self._inputs.build(batch, self.caches)
            logits = self.model(inputs)
            return sample(logits, batch.sampling) if batch.sampling else []


def resolve_dtype(args: EngineArgs, config: ModelConfig) -> torch.dtype:
    """The dtype of weights and activations; ``auto`` is the checkpoint's own.

    Raises:
        ModelError: the checkpoint's own is none that we compute in.
    """
    name = config.dtype.removeprefix("torch.") if args.dtype == "auto" else args.dtype
    if name not in names.DTYPES:
        raise ModelError(f"the checkpoint's dtype is {name}; choose --dtype float32, bfloat16 or float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
