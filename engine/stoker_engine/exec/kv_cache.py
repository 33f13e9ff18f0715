"""How many KV-cache blocks there are, and the tensors that hold them."""

from __future__ import annotations

import logging
import math

import numpy as np
import torch

from stoker_engine.attention.backend import KVCache
from stoker_engine.contract import memory
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import ModelError
from stoker_engine.contract.model_config import ModelConfig
from stoker_engine.parallel.device import memory_bytes

logger = logging.getLogger(__name__)


def plan_kv_cache(args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Decides the cache's size by the contract's memory arithmetic.

    Returns:
        (number of blocks, longest sequence). An unset `--max-model-len` becomes the longest that fits.

    Raises:
        ModelError: the model, or one sequence of `--max-model-len` tokens, does not fit; with the remedy.
    """
    block = memory.kv_block_bytes(config, args.block_size, dtype.itemsize)
    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    elif args.kv_cache_memory_bytes is not None:
        num_blocks = args.kv_cache_memory_bytes // block
    else:
        available = memory_bytes(device)
        weights = memory.weight_bytes(config, dtype.itemsize)
        activations = memory.activation_bytes(config, args.max_num_batched_tokens, args.max_num_seqs, dtype.itemsize)
        size = memory.kv_cache_bytes(
            available, args.gpu_memory_utilization, weights, activations, on_cpu=device.type == "cpu"
        )
        num_blocks = max(size, 0) // block
        if num_blocks == 0:
            raise ModelError(
                f"the model does not fit: {_gib(available)} of memory × {args.gpu_memory_utilization} is less than "
                f"weights {_gib(weights)} + activations {_gib(activations)} + runtime {_gib(memory.RUNTIME_BYTES)}; "
                "give more memory, lower --max-num-batched-tokens or --max-num-seqs, or set --dtype bfloat16"
            )
    longest = num_blocks * args.block_size
    wanted = args.max_model_len or config.max_position_embeddings
    if args.max_model_len is not None and wanted > config.max_position_embeddings:
        raise ModelError(f"--max-model-len {wanted} is beyond the model's own {config.max_position_embeddings}")
    if wanted > longest:
        if args.max_model_len is not None or longest < 2:
            raise ModelError(
                f"the KV cache holds {longest} tokens, one sequence of --max-model-len {wanted} does not fit; "
                f"lower --max-model-len to {longest} or give the cache more memory (--kv-cache-memory-bytes)"
            )
        logger.warning("max_model_len is lowered from %d to %d, the longest that fits the KV cache", wanted, longest)
    max_model_len = min(wanted, longest)
    logger.info(
        "KV cache: %d blocks of %d tokens (%s); longest sequence %d tokens",
        num_blocks,
        args.block_size,
        _gib(num_blocks * block),
        max_model_len,
    )
    return num_blocks, max_model_len


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """One cache a layer. Zeroed: a padded gather reads blocks that were never written, and 0 × nan is nan."""
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    return [KVCache(_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in config.layers]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes zeroed pages from the kernel, which become memory only when a block is first written; torch
    # would write every page now: seconds at start-up, and gigabytes that may never be needed.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def _gib(size: int) -> str:
    return f"{size / memory.GIB:.2f} GiB"
