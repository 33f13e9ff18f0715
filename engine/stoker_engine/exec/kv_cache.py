"""Determines the number of KV-cache blocks, and allocates their memory.

    pool          null block         block 1            …          uint8 [blocks, bytes of a block]
    one block     layer a │ layer b │ layer c                      each in the layout of `exec.kv_views`

Layers of different groups overlap in memory: a block belongs to one group at a time (`sizing.cache_groups`). A block of
a state group holds part of one sequence's states instead (`sizing.state_layout`). On CPUs the memory is not
initialized: it may contain NaN, and attention backends must not let unwritten values reach a result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from stoker_common.errors import ArgumentError, OutOfMemoryError
from stoker_engine.architectures.cache_spec import LayerCache, StateSpec
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.backend import KVCache
from stoker_engine.attention.state_cache import PagedTensor, StateCache
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.exec.kv_views import layer_view
from stoker_engine.models.loading.kv_scales import LayerScales
from stoker_engine.parallel.claim_memory import claim_in_background
from stoker_engine.parallel.communicator import Communicator
from stoker_engine.parallel.device import device_name, memory_bytes
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.parallel.rank_groups import RankGroups
from stoker_engine.parallel.transfer import to_device
from stoker_engine.sizing import memory
from stoker_engine.sizing.batch_limits import BatchLimits, default_batch_limits
from stoker_engine.sizing.cache_groups import CacheGroup, usable_blocks
from stoker_engine.sizing.graph_memory import are_captured
from stoker_engine.sizing.kv_format import KVFormat, kv_format
from stoker_engine.sizing.model_limits import refuse_too_long
from stoker_engine.sizing.pipeline_stages import ONE_STAGE, Stage
from stoker_engine.sizing.state_layout import Piece, state_layout
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats

logger = logging.getLogger(__name__)

#: Maximum time for which memory is claimed in the background, in seconds.
_CLAIM_S = 0.5


@dataclass(frozen=True)
class KVCachePlan:
    """Size of the KV cache.

    Attributes:
        kv: storage format of keys and values.
        num_blocks: number of blocks, including the null block.
        max_model_len: maximum number of tokens of a sequence, prompt and output.
        step_tokens: maximum number of tokens that one step computes.
        max_num_seqs: maximum number of sequences of one step.
        graph_bytes: bytes reserved for CUDA graphs.
    """

    kv: KVFormat
    groups: tuple[CacheGroup, ...]
    num_blocks: int
    block_size: int
    max_model_len: int
    step_tokens: int
    max_num_seqs: int
    graph_bytes: int = 0


def plan_kv_cache(
    args: EngineArgs,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    groups: RankGroups | None = None,
    formats: WeightFormats = ALL_NUMBERS,
) -> KVCachePlan:
    """Compute the size of the KV cache; see `sizing.memory`.

    An unset `--max-model-len` becomes the model's default length, or the longest that fits if that is shorter. Unset
    limits of a step depend on the device (`sizing.batch_limits`). All ranks use the smallest limits, and the smallest
    number of blocks that any of them can hold.

    Args:
        groups: groups of the ranks that share the model, all of which call this function; None: a single rank.

    Raises:
        OutOfMemoryError: the model, or a sequence of `--max-model-len` tokens, does not fit; with the remedy.
        ModelError: `--max-model-len` exceeds the model's own limit.
        ArgumentError: chunked prefill is off, and `--max-num-batched-tokens` is less than the longest sequence.
    """
    ranks, layout = (groups or RankGroups()).engine, RankLayout.of(args)
    kv = kv_format(args.kv_cache_dtype, str(dtype))
    cache_groups = memory.model_cache_groups(config, args.block_size, kv, layout.tensor)
    specs = memory.layer_caches(config, layout.tensor)
    layers = (groups or RankGroups()).pipeline.stage.layers(len(specs))
    block = memory.kv_block_bytes(memory.stage_cache_groups(cache_groups, layers, specs, kv), args.block_size)
    limits = _batch_limits(args, device, ranks)
    step_tokens = limits.max_num_batched_tokens
    use = _memory_use(args, limits, config, dtype, device, layout, formats)
    num_blocks = int(ranks.all_gather(torch.tensor([use.num_blocks])).min())
    refuse_too_long(args.max_model_len, config)
    model_len = args.max_model_len or config.default_model_len
    usable = usable_blocks(num_blocks)
    longest = memory.longest_sequence(cache_groups, usable, step_tokens, args.block_size, model_len)
    if longest < model_len and (args.max_model_len is not None or longest < 2):
        shorter = f"lower --max-model-len to {longest} or " if longest > 1 else ""
        larger = "increase the cache's memory (--kv-cache-memory-bytes)"
        raise OutOfMemoryError(
            f"the KV cache holds only {longest} tokens, less than one sequence of --max-model-len {model_len}; "
            f"{shorter}{larger if args.num_gpu_blocks_override is None else 'raise --num-gpu-blocks-override'}"
        )
    if longest < model_len:
        logger.warning("max_model_len is reduced from %d to %d, the longest that fits the KV cache", model_len, longest)
    if not args.enable_chunked_prefill and step_tokens < longest:
        raise ArgumentError(
            "--no-enable-chunked-prefill",
            f"a prompt of up to {longest} tokens must fit into one step; raise --max-num-batched-tokens to {longest}, "
            "or lower --max-model-len",
        )
    logger.info(
        "KV cache: %d blocks of %d tokens (%s); longest sequence %d tokens",
        num_blocks,
        args.block_size,
        _gib(num_blocks * block),
        longest,
    )
    logger.info("a step has at most %d sequences and %d tokens", limits.max_num_seqs, step_tokens)
    return KVCachePlan(
        kv, cache_groups, num_blocks, args.block_size, longest, step_tokens, limits.max_num_seqs, use.graphs
    )


def _batch_limits(args: EngineArgs, device: torch.device, ranks: Communicator) -> BatchLimits:
    """Return the limits of a step: those of the arguments, or the defaults for the devices of all ranks."""
    on_cpu = device.type == "cpu"
    memory_of_one = 0 if on_cpu else memory_bytes(device, 1)
    unbounded = args.long_prefill_token_threshold == 0
    found = default_batch_limits(memory_of_one, device_name(device), on_cpu=on_cpu, unbounded_prompts=unbounded)
    sequences, tokens = found.max_num_seqs, found.max_num_batched_tokens
    if not on_cpu:
        sequences, tokens = (int(ranks.all_gather(torch.tensor([each])).min()) for each in (sequences, tokens))
    return BatchLimits(args.max_num_seqs or sequences, args.max_num_batched_tokens or tokens)


class KVCachePool:
    """Memory of the KV cache, and each layer's view of it.

    Args:
        specs: cache contents of each layer of the model, on one of the ranks that share it.
        dtype: dtype of the model, and of states whose spec has none.
        scales: scales by layer, for layers that have their own; others use 1.
        stage: the pipeline stage whose layers are allocated.

    Attributes:
        caches: views of this stage's layers with keys and values, in order.
        states: states of this stage's layers that keep one, in order.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        specs: Sequence[LayerCache],
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[int, LayerScales] = MappingProxyType({}),
        stage: Stage = ONE_STAGE,
    ) -> None:
        groups = memory.stage_cache_groups(plan.groups, stage.layers(len(specs)), specs, plan.kv)
        self._pool = allocate((plan.num_blocks, memory.kv_block_bytes(groups, plan.block_size)), device)
        caches: dict[int, KVCache] = {}
        self.states: list[StateCache] = []
        for index, group in enumerate(groups):
            members = [specs[layer] for layer in group.layers]
            if group.kind == "state":
                self.states = _states(self._pool, [spec for spec in members if spec.kind == "state"], dtype, index)
                continue
            start = 0
            for layer, spec in zip(group.layers, members, strict=True):
                assert spec.kind == "tokens"
                size = plan.kv.token_bytes(spec) * plan.block_size
                part = self._pool[:, start : start + size]
                layer_scales, heads_first = scales.get(layer), device.type == "cpu"
                caches[layer] = layer_view(part, spec, plan.block_size, index, plan.kv, layer_scales, heads_first)
                start += size
        self.caches = [caches[layer] for layer in sorted(caches)]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks; all are read before any is written."""
        if copies:
            source, target = to_device(copies, self._pool.device).unbind(1)
            self._pool[target] = self._pool[source]


def _states(pool: torch.Tensor, specs: Sequence[StateSpec], dtype: torch.dtype, group: int) -> list[StateCache]:
    """Views of the states in a group's blocks, layer by layer.

    Args:
        pool: uint8 [blocks, bytes of a block].
        dtype: dtype of tensors whose spec has none.
    """
    found = []
    for spec, pieces_by_tensor in zip(specs, state_layout(specs, dtype.itemsize, pool.shape[1]), strict=True):
        tensors = {}
        for tensor in spec.tensors:
            tensor_dtype: torch.dtype = dtype if tensor.dtype is None else getattr(torch, tensor.dtype)
            pieces = (
                Piece(piece.index, piece.start // tensor_dtype.itemsize, piece.stop // tensor_dtype.itemsize)
                for piece in pieces_by_tensor[tensor.name]
            )
            tensors[tensor.name] = PagedTensor(pool.view(tensor_dtype), tensor.shape, tuple(pieces))
        found.append(StateCache(tensors, group))
    return found


def _memory_use(
    args: EngineArgs,
    limits: BatchLimits,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layout: RankLayout,
    formats: WeightFormats,
) -> memory.MemoryUse:
    numbers = memory.Numbers(
        element_bytes=dtype.itemsize,
        kv=kv_format(args.kv_cache_dtype, str(dtype)),
        block_size=args.block_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        num_blocks=args.num_gpu_blocks_override,
        formats=formats,
        fused=device.type == "cuda",
        has_graphs=are_captured(args.enforce_eager, args.attention_backend),
        max_model_len=args.max_model_len,
        adapters=_adapters(args, dtype, device),
    )
    usable_device = memory.Device(
        memory_bytes(device, layout.size * args.data_parallel_size // args.nnodes),
        args.gpu_memory_utilization,
        on_cpu=device.type == "cpu",
        sharding=layout.sharding,
    )
    use = memory.memory_use(config, numbers, usable_device)
    # An explicit size of the cache does not reduce the memory that weights and adapters need.
    too_large = use.weights + use.adapters > usable_device.memory_bytes
    is_fixed = args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None
    if too_large or (use.usable_blocks < 1 and not is_fixed):
        remedies = [
            "provide more memory",
            f"reduce {'--max-cpu-loras, --max-loras, --max-lora-rank, ' if use.adapters else ''}"
            "--max-num-batched-tokens or --max-num-seqs",
            *(["set --lora-target-modules"] if use.adapters else []),
            *(["set --dtype bfloat16"] if dtype.itemsize > torch.bfloat16.itemsize else []),
        ]
        raise OutOfMemoryError(
            f"the model does not fit: {_gib(usable_device.memory_bytes)} of memory × {args.gpu_memory_utilization} is "
            f"less than weights {_gib(use.weights)} + {_of_adapters(use, numbers.adapters)}activations "
            f"{_gib(use.activations)} + runtime {_gib(use.allowances)} + a block of the KV cache; "
            f"{', '.join(remedies[:-1])}, or {remedies[-1]}"
        )
    if is_fixed:
        block = max(memory.stage_block_bytes(config, numbers, layout.sharding))
        _check_fixed_size(args, use, block, usable_device)
    if use.adapters:
        logger.info("memory of %s", _of_adapters(use, numbers.adapters).removesuffix(" + "))
    return use


def _check_fixed_size(args: EngineArgs, use: memory.MemoryUse, block: int, device: memory.Device) -> None:
    """Check that a cache of a stated size fits into a rank's memory beside weights and adapters.

    Args:
        block: bytes of a block on the stage where it is largest.

    Raises:
        OutOfMemoryError: it does not; with the largest size that does.
    """
    room = device.memory_bytes - use.weights - use.adapters
    # For CPUs the other sums are upper estimates, which would refuse what fits.
    rest = room if device.on_cpu else max(room - use.activations - use.allowances, 0)
    if args.num_gpu_blocks_override is not None:
        flag, size, limit = "--num-gpu-blocks-override", use.num_blocks * block, f"{rest // block}"
    else:
        flag, size, limit = "--kv-cache-memory-bytes", use.kv_cache, f"{rest >> 20}M"
    if size > room:
        raise OutOfMemoryError(
            f"a KV cache of {_gib(size)} does not fit: {_gib(device.memory_bytes)} of memory also hold weights of "
            f"{_gib(use.weights)}{f' and adapters of {_gib(use.adapters)}' if use.adapters else ''}; "
            f"lower {flag} to at most {limit}"
        )


def _adapters(args: EngineArgs, dtype: torch.dtype, device: torch.device) -> memory.AdapterNumbers | None:
    """Return the size of the adapters in the device's memory; None: LoRA is off. They are stored in the model's dtype,
    even if their values are rounded to another."""
    if not args.enable_lora:
        return None
    count = args.num_resident_adapters if device.type == "cpu" else args.max_loras
    return memory.AdapterNumbers(count, args.max_lora_rank, dtype.itemsize, args.lora_target_modules)


def _of_adapters(use: memory.MemoryUse, adapters: memory.AdapterNumbers | None) -> str:
    """The adapters' term in an error message; empty without LoRA."""
    if adapters is None:
        return ""
    return f"adapters {_gib(use.adapters)} ({adapters}) + "


def allocate(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Allocate uint8 [blocks, bytes of a block]; not initialized on a CPU."""
    if device.type != "cpu":  # external attention kernels multiply masked values by 0, so these must not be NaN
        try:
            return torch.zeros(shape, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, whole = torch.cuda.mem_get_info(device)
            raise OutOfMemoryError(
                f"the KV cache needs {_gib(math.prod(shape))}, but only {_gib(free)} of the GPU's {_gib(whole)} are "
                "free; stop other processes on this GPU, or reduce --gpu-memory-utilization"
            ) from error
    # NumPy requests huge pages if the kernel supports them. Memory is claimed in the order in which blocks are used.
    pool = torch.from_numpy(np.empty(math.prod(shape), dtype=np.uint8)).view(shape)
    claim_in_background(pool, within_s=_CLAIM_S)
    return pool


def _gib(size: int) -> str:
    return f"{size / memory.GIB:.2f} GiB"
