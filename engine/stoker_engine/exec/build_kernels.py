"""Compiles the kernels of a model ahead of time, without a GPU.

The model consists of fake tensors (shapes without data) and runs the steps of `exec.warm_up`; see
`kernels.triton.compile.compile_only`. An engine that starts with Triton's cache then need not compile these kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.triton import TritonBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.exec.check_sharding import refuse_indivisible
from stoker_engine.exec.device_batch import DeviceBatch
from stoker_engine.exec.dtypes import resolve_dtype
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import InputBuilder
from stoker_engine.exec.kv_cache import KVCachePlan, KVCachePool
from stoker_engine.exec.warm_up import warm_up_steps
from stoker_engine.kernels.compile_progress import watch_compilations
from stoker_engine.kernels.select import triton_kernels
from stoker_engine.kernels.select_token import COLUMNS
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.kernels.triton.compile.ahead_of_time import TARGETS, gpu_target
from stoker_engine.kernels.triton.compile.compile_only import OnLaunch, compile_only
from stoker_engine.kernels.triton.compile.driver import build_driver, can_build_driver
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.lora.adapter_reader import native_adapter_reader
from stoker_engine.lora.loaded_adapters import LoadedAdapters
from stoker_engine.lora.slot_stacks import grouped_adapters
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.decoder_loader import DecoderLoader, settle
from stoker_engine.models.loading.stored_weights import with_formats
from stoker_engine.models.model import StepInputs
from stoker_engine.sizing import memory
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.weight_formats import WeightFormats

logger = logging.getLogger(__name__)

_SEQUENCES: Final = 160
_TOKENS: Final = 256
#: Size of the KV cache, in bytes: beyond the range of 32-bit offsets, as on a real GPU.
_CACHE_BYTES: Final = 8 << 30


def build_kernels_of(args: EngineArgs, targets: Sequence[str]) -> None:
    """Compile the kernels of the model in `args` and, for NVIDIA's targets, Triton's driver; log the results.

    Args:
        targets: names from `TARGETS`.

    Raises:
        ArgumentError: a target is not supported, or the model cannot be split into the given number of ranks.
        ModelError: the model cannot be found, or runs by transformers' own modules.
    """
    if unknown := [name for name in targets if name not in TARGETS]:
        raise ArgumentError("--target", f"{unknown[0]!r} is not supported; the targets are {', '.join(TARGETS)}")
    checkpoint = find_checkpoint(args)
    if not isinstance(checkpoint.loader, DecoderLoader):
        raise ModelError(f"{checkpoint.config.architecture} runs by transformers' own modules and has no kernels")
    refuse_indivisible(args, checkpoint)
    device = torch.device("cuda")
    dtype = resolve_dtype(args, checkpoint, device)
    formats = checkpoint.weight_formats(dtype, device)
    for name in targets:
        started = time.monotonic()
        compiled = build_kernels(args, checkpoint.config, formats, dtype, gpu_target(name))
        logger.info("%s: %d kernels compiled in %.1f s", name, len(compiled), time.monotonic() - started)
    if any(name.startswith("sm_") for name in targets):
        _build_driver()


def _build_driver() -> None:
    if can_build_driver():
        build_driver(Path(knobs.cache.dir))
    else:
        logger.warning("no C compiler or Python headers found here: Triton needs both on the machine with the GPU")


def build_kernels(
    args: EngineArgs,
    config: ModelConfig,
    formats: WeightFormats,
    dtype: torch.dtype,
    target: GPUTarget,
    on_launch: OnLaunch | None = None,
) -> list[str]:
    """Compile the kernels for one rank of a model.

    Args:
        on_launch: see `compile_only`.

    Returns:
        Names of the compiled kernels, without those that were already in the cache.
    """
    device = torch.device("cuda")
    capability = divmod(int(target.arch), 10) if target.backend == "cuda" else None
    kernels = triton_kernels(capability, dtype, args.batch_invariant, args.fp8_weight_only)
    adapters: LoadedAdapters | None = None
    if args.enable_lora:
        reader, grouped = native_adapter_reader(config, args, dtype), grouped_adapters(args, config, kernels)
        adapters = LoadedAdapters(reader, dtype, args.max_loras, device, None, grouped)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with watch_compilations(lambda: None) as compiled, torch.no_grad(), fake, compile_only(target, on_launch):
        build = Build(dtype, TritonBackend(args.batch_invariant), kernels, _FakeCommunicator(args.tensor_parallel_size))
        build = replace(build, linear=with_formats(formats, build.linear), whole_experts=args.enable_expert_parallel)
        if adapters is not None:
            build = replace(build, extend=adapters.extend)
        kv = kv_format(args.kv_cache_dtype, str(dtype))
        groups = memory.model_cache_groups(config, args.block_size, kv, args.tensor_parallel_size)
        num_blocks = _CACHE_BYTES // memory.kv_block_bytes(groups, args.block_size)
        plan = KVCachePlan(kv, groups, num_blocks, args.block_size, _TOKENS, _TOKENS, _SEQUENCES)
        with device:
            model = Decoder(config, build, _TOKENS)
        settle(model)
        specs = memory.layer_caches(config, args.tensor_parallel_size)
        pool = KVCachePool(plan, specs, dtype, device)
        rows = InputBatch(_SEQUENCES, 2 * _TOKENS, args.block_size, groups)
        device_batch = DeviceBatch(rows.values, device)
        build.rows.adapters = device_batch.adapters
        if adapters is not None:
            adapters.settle(build.rows)
        builder = InputBuilder(args.block_size, groups, device, rows, device_batch, gathers=True)
        slot = NO_ADAPTER if adapters is None else 0
        for step in warm_up_steps(_SEQUENCES, _TOKENS, _TOKENS, len(groups), slot):
            rows.apply(step)
            inputs = builder.build(step)
            prepared = build.backend.prepare(inputs.metadata)
            build.rows.begin(inputs.token_rows)
            build.rows.select(RowSpace.LOGITS, RowSpace.TOKENS, inputs.logit_rows)
            hidden = model.forward(StepInputs(inputs.token_ids, inputs.positions, prepared, pool.caches))
            _sample(model.logits(hidden[inputs.logit_rows]).float())
    return compiled


def _sample(logits: torch.Tensor) -> None:
    rows = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    num_words = -(-logits.shape[1] // 32)
    TRITON.keep_allowed(logits, rows, torch.zeros((len(logits), num_words), dtype=torch.int32, device=logits.device))
    TRITON.logprobs(logits, TRITON.argmax(logits)[0])
    TRITON.select_token(logits, torch.zeros((len(logits), len(COLUMNS)), dtype=torch.float64, device=logits.device))


class _FakeCommunicator:
    """Communicator of rank 0 of `size` ranks, for shapes only: results contain the values of rank 0 alone."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        """See `Communicator`."""
        return torch.cat([x] * self.size, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return x
