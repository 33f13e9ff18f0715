"""Memory arithmetic: the planner predicts with these sums, and the runner allocates by them.

    budget  =  utilization × device memory
    left    =  budget − weights − adapters − activations − allowances
    blocks  =  the most for which blocks × bytes of one block + CUDA graphs for so many blocks ≤ left
               one is the null block, the rest are usable
    KV      =  left − CUDA graphs

Sizes are bytes on one device. An engine is spread over `Sharding.tensor` × `Sharding.pipeline` devices. All of
them share the block tables, so the stage with room for the fewest blocks determines the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from stoker_engine.architectures.cache_spec import LayerCache, StateSpec
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.activations import activation_bytes
from stoker_engine.sizing.cache_groups import (
    CacheGroup,
    blocks_per_sequence,
    bytes_per_position,
    cache_groups,
    usable_blocks,
)
from stoker_engine.sizing.graph_memory import graph_bytes
from stoker_engine.sizing.kv_format import KVFormat
from stoker_engine.sizing.lora import adapter_bytes
from stoker_engine.sizing.packed_weights import workspace_bytes
from stoker_engine.sizing.pipeline_stages import pipeline_stages
from stoker_engine.sizing.quantized_weights import QuantizedWeights
from stoker_engine.sizing.state_layout import aligned, state_bytes
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats
from stoker_engine.sizing.weight_sizes import ONE_DEVICE, Sharding, stage_weight_bytes
from stoker_engine.sizing.weight_sizes import weight_bytes as weight_bytes

GIB: Final = 1024**3

#: Bytes reserved for the interpreter, torch, and the device's context and buffers: an upper estimate, not measured.
RUNTIME_BYTES: Final = 1 * GIB

#: Bytes reserved for CUDA graphs of other runtimes, and of models that Stoker's GPU kernels do not compute. vLLM's logs
#: report 0.3 to 1 GiB for models of 8 to 70 billion parameters.
OTHER_GRAPH_BYTES: Final = 1 * GIB

#: Bytes reserved for buffers of collective communication if an engine has several devices. None are reserved on
#: CPUs, whose ranks need half a MiB each.
COMMUNICATION_BYTES: Final = GIB // 2

#: Limit of the KV cache on CPUs (vLLM's default there), whose memory is shared with other programs.
#: ``--kv-cache-memory-bytes`` overrides it.
CPU_KV_CACHE_LIMIT: Final = 4 * GIB


@dataclass(frozen=True)
class Device:
    """The devices of an engine.

    Attributes:
        memory_bytes: memory of one device; on CPUs, of the container.
        utilization: fraction of the memory that may be used.
        on_cpu: whether the device is a CPU.
        sharding: devices that the engine is spread over.
    """

    memory_bytes: int
    utilization: float
    on_cpu: bool
    sharding: Sharding = ONE_DEVICE

    @property
    def allowances(self) -> int:
        """Bytes reserved beside weights, activations, CUDA graphs and cache."""
        if self.on_cpu:
            return RUNTIME_BYTES
        devices = self.sharding.tensor * self.sharding.pipeline * self.sharding.expert
        return RUNTIME_BYTES + (COMMUNICATION_BYTES if devices > 1 else 0)


@dataclass(frozen=True)
class AdapterNumbers:
    """The LoRA adapters in a device's memory.

    Attributes:
        count: maximum number of adapters: the slots on GPUs, all resident adapters on CPUs.
        rank: maximum rank.
        element_bytes: bytes of one element.
        target_modules: modules that adapters may change; empty: all.
    """

    count: int
    rank: int
    element_bytes: int
    target_modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.count} × rank {self.rank}"


@dataclass(frozen=True)
class Numbers:
    """Settings that determine memory use, beside the model's shape.

    Attributes:
        element_bytes: bytes of one element of unquantized weights and activations.
        kv: storage format of the KV cache.
        block_size: tokens in one block.
        max_num_batched_tokens: maximum tokens in one step.
        max_num_seqs: maximum sequences in one step.
        quantized: format of the layers' matrices; None: unquantized, or as `formats` states.
        formats: formats of the matrices that are stored in blocks.
        fused: whether Stoker's GPU kernels compute the step.
        has_graphs: whether a GPU may run steps as CUDA graphs.
        max_model_len: maximum tokens of a sequence, prompt and output; None: the model's default.
        adapters: LoRA adapters; None: none are served.
        kv_cache_memory_bytes: size of the cache; None: the memory that is left.
        num_blocks: fixed number of cache blocks, including the null block; None: computed from the size of the cache.
    """

    element_bytes: int
    kv: KVFormat
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    quantized: QuantizedWeights | None = None
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    formats: WeightFormats = ALL_NUMBERS
    fused: bool = False
    has_graphs: bool = True
    max_model_len: int | None = None
    adapters: AdapterNumbers | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Memory use of one device, in bytes.

    Attributes:
        weights: bytes of the weights, on the stage with most.
        activations: bytes of a step's activations and logits.
        allowances: bytes reserved for everything else, including `graphs`.
        kv_cache: bytes of the cache on the stage with the fewest blocks: `Numbers.kv_cache_memory_bytes`, or the bytes
            left; negative if the model does not fit.
        num_blocks: number of cache blocks, the same on every device, including the null block.
        adapters: bytes reserved for LoRA adapters, on the stage with most.
        graphs: bytes reserved for CUDA graphs.
    """

    weights: int
    activations: int
    allowances: int
    kv_cache: int
    num_blocks: int
    adapters: int = 0
    graphs: int = 0

    @property
    def usable_blocks(self) -> int:
        """Number of blocks that sequences can use."""
        return usable_blocks(self.num_blocks)


def memory_use(config: ModelConfig, numbers: Numbers, device: Device) -> MemoryUse:
    """Return how a model uses the memory of an engine's devices."""
    split = device.sharding
    activations = activation_bytes(
        config,
        numbers.max_num_batched_tokens,
        numbers.max_num_seqs,
        numbers.element_bytes,
        split,
        numbers.fused,
        workspace_bytes(numbers.formats),
    )
    blocks = stage_block_bytes(config, numbers, split)
    weights = [
        stage_weight_bytes(config, stage, numbers.element_bytes, split, numbers.quantized, numbers.formats)
        for stage in range(split.pipeline)
    ]
    adapters = stage_adapter_bytes(config, numbers, split)
    fixed_bytes = numbers.kv_cache_memory_bytes
    left = [
        kv_cache_bytes(device, of_weights + of_adapters, activations) if fixed_bytes is None else fixed_bytes
        for of_weights, of_adapters in zip(weights, adapters, strict=True)
    ]
    if numbers.num_blocks is not None or fixed_bytes is not None:
        num_blocks = _fitting(left, blocks) if numbers.num_blocks is None else numbers.num_blocks
    else:
        num_blocks = _fitting_beside_graphs(left, blocks, partial(_graph_bytes, config, numbers, device))
    graphs = _graph_bytes(config, numbers, device, num_blocks)
    kv_bytes = [of_stage - graphs for of_stage in left] if fixed_bytes is None else left
    stage = min(range(split.pipeline), key=lambda index: kv_bytes[index] / blocks[index])
    allowances = device.allowances + graphs
    return MemoryUse(max(weights), activations, allowances, kv_bytes[stage], num_blocks, max(adapters), graphs)


def _fitting(kv_bytes: Sequence[int], block_bytes: Sequence[int]) -> int:
    """Return the number of cache blocks for which every stage has memory.

    Args:
        kv_bytes: bytes for the cache on each stage.
        block_bytes: bytes of one block on each stage.
    """
    return max(min(size // block for size, block in zip(kv_bytes, block_bytes, strict=True)), 0)


def _fitting_beside_graphs(left: Sequence[int], block_bytes: Sequence[int], graphs: Callable[[int], int]) -> int:
    """Return the largest number of cache blocks for which every stage has memory beside CUDA graphs.

    Args:
        left: bytes for cache and graphs on each stage.
        block_bytes: bytes of one block on each stage.
        graphs: returns the bytes of the graphs for a number of blocks; more blocks never need fewer.
    """

    def fitting_beside(num_blocks: int) -> int:
        taken = graphs(num_blocks)
        return _fitting([of_stage - taken for of_stage in left], block_bytes)

    fits = fitting_beside(_fitting(left, block_bytes))  # beside graphs for more blocks
    largest = fitting_beside(fits)  # beside graphs for fewer blocks
    while fits < largest:
        middle = (fits + largest + 1) // 2
        if middle <= fitting_beside(middle):
            fits = middle
        else:
            largest = middle - 1
    return fits


def _graph_bytes(config: ModelConfig, numbers: Numbers, device: Device, num_blocks: int) -> int:
    """Return the bytes reserved for CUDA graphs, for a cache of `num_blocks` blocks."""
    # Steps with adapters are not captured if each rank has other experts (`exec.build_runner`).
    adapted_experts = numbers.adapters is not None and device.sharding.expert > 1
    if device.on_cpu or not numbers.has_graphs or (numbers.fused and adapted_experts):
        return 0
    if not numbers.fused or config.num_weights is not None:
        return OTHER_GRAPH_BYTES
    size, step_tokens = numbers.block_size, numbers.max_num_batched_tokens
    groups = model_cache_groups(config, size, numbers.kv, device.sharding.tensor)
    model_len = min(numbers.max_model_len or config.default_model_len, config.longest_model_len)
    return graph_bytes(
        config,
        numbers.max_num_seqs,
        step_tokens,
        longest_sequence(groups, usable_blocks(num_blocks), step_tokens, size, model_len),
        num_blocks * size,
        numbers.element_bytes,
        size,
        len(groups),
        device.sharding,
        numbers.adapters is not None,
    )


def model_cache_groups(config: ModelConfig, block_size: int, kv: KVFormat, tensor: int = 1) -> tuple[CacheGroup, ...]:
    """Return the groups of layers that share block tables, on one device.

    Args:
        block_size: tokens in one block.
        kv: storage format of the cache.
        tensor: tensor-parallel size.
    """
    return cache_groups(layer_caches(config, tensor), block_size, kv)


def layer_caches(config: ModelConfig, tensor: int = 1) -> list[LayerCache]:
    """Return the cache spec of each layer on one of `tensor` devices."""
    specs: dict[int, LayerCache] = {}
    for layer in config.layers:
        if id(layer.attention) not in specs:
            specs[id(layer.attention)] = _sharded(layer.cache, tensor)
    return [specs[id(layer.attention)] for layer in config.layers]


def stage_block_bytes(config: ModelConfig, numbers: Numbers, split: Sharding) -> list[int]:
    """Return the bytes of one KV-cache block on each stage. Block tables cover the whole model, so a stage holds its
    layers' part of every group."""
    size, kv = numbers.block_size, numbers.kv
    specs = layer_caches(config, split.tensor)
    groups = cache_groups(specs, size, kv)
    return [
        kv_block_bytes(stage_cache_groups(groups, layers, specs, kv), size)
        for layers in pipeline_stages(len(specs), split.pipeline)
    ]


def stage_cache_groups(
    groups: Sequence[CacheGroup], layers: range, specs: Sequence[LayerCache], kv: KVFormat
) -> list[CacheGroup]:
    """Return each group restricted to one stage's `layers`. All stages use the same block tables.

    Args:
        specs: cache spec of each layer of the model, on one device.
    """
    return [_part(group, layers, specs, kv) for group in groups]


def _part(group: CacheGroup, layers: range, specs: Sequence[LayerCache], kv: KVFormat) -> CacheGroup:
    held = tuple(layer for layer in group.layers if layer in layers)
    tokens = states = 0
    for layer in held:
        spec = specs[layer]
        if spec.kind == "tokens":
            tokens += kv.token_bytes(spec)
        else:
            states += state_bytes(spec, kv.state_bytes)
    return replace(group, layers=held, bytes_per_token=tokens, state_bytes=states)


def kv_block_bytes(groups: Sequence[CacheGroup], block_size: int) -> int:
    """Return the bytes of one KV-cache block: the maximum of `block_size` tokens and a block's part of a state."""
    block = bytes_per_position(groups) * block_size
    parts = [-(-group.state_bytes // group.blocks_per_sequence) for group in groups if group.kind == "state"]
    return aligned(max(block, *parts)) if parts else block


def stage_adapter_bytes(config: ModelConfig, numbers: Numbers, split: Sharding) -> list[int]:
    """Return the bytes reserved for LoRA adapters on each stage."""
    adapters = numbers.adapters
    if adapters is None:
        return [0] * split.pipeline
    each = adapter_bytes(config, adapters.rank, adapters.element_bytes, split, numbers.formats, adapters.target_modules)
    return [adapters.count * size for size in each]


def kv_cache_bytes(device: Device, weights: int, activations: int) -> int:
    """Return the bytes left for the KV cache and CUDA graphs, on CPUs at most `CPU_KV_CACHE_LIMIT`; `weights` include
    the bytes of adapters. The result is not positive if the model does not fit."""
    available = int(device.memory_bytes * device.utilization) - weights - activations - device.allowances
    return min(available, CPU_KV_CACHE_LIMIT) if device.on_cpu else available


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, step_tokens: int, block_size: int, limit: int
) -> int:
    """Return the length, at most `limit` tokens, of the longest sequence that fits into `num_blocks` usable blocks if
    at most `step_tokens` tokens are computed in a step; 0 if none fits."""

    def fits(length: int) -> bool:
        return blocks_per_sequence(groups, length, step_tokens, block_size) <= num_blocks

    if fits(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _sharded(spec: LayerCache, tensor: int) -> LayerCache:
    """Return the cache spec of one rank. KV heads are split, or replicated if there are fewer than devices. Latent
    vectors and state tensors without a shard dimension are replicated."""
    if spec.kind == "tokens":
        heads = spec.num_kv_heads if spec.latent else -(-spec.num_kv_heads // tensor)
        return replace(spec, num_kv_heads=heads)
    tensors = []
    for each in spec.tensors:
        shape = [-(-size // tensor) if dim == each.shard_dim else size for dim, size in enumerate(each.shape)]
        tensors.append(replace(each, shape=tuple(shape)))
    return StateSpec(tuple(tensors))
