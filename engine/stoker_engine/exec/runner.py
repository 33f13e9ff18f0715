"""Loads the model onto the device and runs batches there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.native import NativeBackend
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract import names
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import ModelError
from stoker_engine.core.batch import ScheduledBatch, ScheduledSequence, StepResult
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.exec.inputs import InputBuilder, Inputs
from stoker_engine.exec.kv_cache import KVCachePool, plan_kv_cache
from stoker_engine.kernels.argmax import argmax
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.parallel.device import limit_threads, resolve_device, torch_threads
from stoker_engine.sampling.logprobs import token_logprobs
from stoker_engine.sampling.sampler import sample
from stoker_engine.sizing import memory

logger = logging.getLogger(__name__)


class Runner:
    """One model on one device.

    Args:
        on_progress: called whenever loading gets on.

    Attributes:
        plan: the KV cache's size.

    Raises:
        ArgumentError: the device or dtype cannot be had.
        ModelError: the weights do not match, or the model does not fit.
    """

    def __init__(self, args: EngineArgs, checkpoint: Checkpoint, on_progress: Callable[[], None]) -> None:
        self.device = resolve_device(args)
        if self.device.type == "cpu":
            limit_threads()
        self.config = checkpoint.config
        self.dtype = resolve_dtype(args, self.config)
        backend = attention_backend(self.device, self.dtype, args.batch_invariant)
        self.plan = plan_kv_cache(args, self.config, self.dtype, self.device)
        started = time.monotonic()
        with torch.inference_mode():
            self.model = checkpoint.load(backend, self.dtype, self.device, self.plan.max_model_len, on_progress)
            specs = [layer.cache for layer in self.config.layers]
            self._pool = KVCachePool(self.plan, specs, self.dtype, self.device)
        logger.info("loaded %s on %s in %.1f s", self.dtype, self.device, time.monotonic() - started)
        # The Transformers backend computes with torch's operators, our decoder with kernels that share work themselves.
        native = isinstance(backend, NativeBackend) and isinstance(self.model, Decoder)
        self._torch_threads = 1 if native else None
        self._rows_at_once = memory.sampler_rows(
            self.config.vocab_size, min(args.max_num_seqs, args.max_num_batched_tokens)
        )
        self._inputs = InputBuilder(args.block_size, len(self.plan.groups), self.device)

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Computes the batch and samples ``batch.sampling``."""
        with torch.inference_mode(), torch_threads(self._torch_threads):
            started = time.monotonic()
            self._pool.copy(batch.copies)
            inputs = self._inputs.build(batch, self._pool.caches)
            prepared = time.monotonic()
            hidden = self.model.forward(inputs.step)
            rows = [inputs.last_rows[sequence.id] for sequence in batch.sampling]
            logits = self.model.logits(hidden[rows]) if rows else None
            computed = time.monotonic()
            sampled = [] if logits is None else sample(logits, batch.sampling, self._rows_at_once)
            prompt_logprobs = {
                sequence.id: self._prompt_logprobs(hidden, inputs, sequence)
                for sequence in batch.sequences
                if sequence.prompt_positions
            }
            sample_time = time.monotonic() - computed
            return StepResult(sampled, prompt_logprobs, prepared - started, computed - prepared, sample_time)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, inputs: Inputs, sequence: ScheduledSequence
    ) -> list[TokenLogprobs] | None:
        """Of the prompt tokens that follow `prompt_positions`; a few rows at a time, so that memory never spikes. None
        where logits are no finite numbers."""
        assert isinstance(sequence.params, SamplingParams) and sequence.params.prompt_logprobs is not None
        positions, found = sequence.prompt_positions, list[TokenLogprobs]()
        first = inputs.first_rows[sequence.id] - sequence.start
        for start in range(positions.start, positions.stop, self._rows_at_once):
            stop = min(start + self._rows_at_once, positions.stop)
            logits = self.model.logits(hidden[first + start : first + stop])
            if not argmax(logits)[1].isfinite().all():
                return None
            tokens = sequence.known[start + 1 : stop + 1]
            found += token_logprobs(logits, tokens, [sequence.params.prompt_logprobs] * len(tokens))
        return found


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
