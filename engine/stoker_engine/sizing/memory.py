"""Memory arithmetic: the planner predicts by these sums and the runner allocates by them.

    budget  =  utilization × device memory
    KV      =  budget − weights − adapters − activations − allowances
    blocks  =  ⌊KV ÷ bytes of one block⌋, of which one is the null block and the rest are usable

All results are bytes on one device. An engine of the model is spread over `Sharding.tensor` × `Sharding.pipeline`
devices; the block tables are the same on all of them, so the stage with the least room decides how many blocks there
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from stoker_engine.sizing.kv_format import KVFormat
from stoker_engine.sizing.lora import adapter_bytes
from stoker_engine.sizing.pipeline_stages import pipeline_stages
from stoker_engine.sizing.quantized_weights import QuantizedWeights
from stoker_engine.sizing.state_layout import aligned, state_bytes
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats
from stoker_engine.sizing.weight_sizes import ONE_DEVICE, Sharding, stage_weight_bytes
from stoker_engine.sizing.weight_sizes import weight_bytes as weight_bytes

GIB: Final = 1024**3

#: An allowance for the interpreter, torch, a device's context and its buffers; not measured yet, and meant to be more
#: than they take.
RUNTIME_BYTES: Final = 1 * GIB

#: An allowance for CUDA graphs. vLLM's logs report 0.3 to 1 GiB for models of 8 to 70 billion weights.
GRAPH_BYTES: Final = 1 * GIB

#: An allowance for the buffers of collective communication, where an engine is spread over several devices. CPUs need
#: none: of the memory in which ranks meet, each one's part is half a MiB.
COMMUNICATION_BYTES: Final = GIB // 2

#: On CPU the memory is the machine's own and shared with other programs, so the cache stops here unless
#: ``--kv-cache-memory-bytes`` is larger (vLLM's default on CPU).
CPU_KV_CACHE_LIMIT: Final = 4 * GIB


@dataclass(frozen=True)
class Device:
    """What an engine of the model is given.

    Attributes:
        memory_bytes: of one device; on CPU the container's.
        utilization: share of it that may be used.
        on_cpu: whether it is a CPU.
        sharding: over how many devices an engine is spread.
    """

    memory_bytes: int
    utilization: float
    on_cpu: bool
    sharding: Sharding = ONE_DEVICE

    @property
    def allowances(self) -> int:
        """What is kept free beside weights, activations and cache."""
        if self.on_cpu:
            return RUNTIME_BYTES
        devices = self.sharding.tensor * self.sharding.pipeline * self.sharding.expert
        return RUNTIME_BYTES + GRAPH_BYTES + (COMMUNICATION_BYTES if devices > 1 else 0)


@dataclass(frozen=True)
class AdapterNumbers:
    """The LoRA adapters that are in a device's memory.

    Attributes:
        count: at most so many: those of the slots on GPUs; on CPU all that are resident.
        rank: the largest of one.
        element_bytes: of one number of theirs.
        target_modules: the modules that they may change; empty: all.
    """

    count: int
    rank: int
    element_bytes: int
    target_modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.count} × rank {self.rank}"


@dataclass(frozen=True)
class Numbers:
    """What takes memory, beside the model's shape.

    Attributes:
        element_bytes: of one weight and one activation.
        kv: how the KV cache stores numbers.
        block_size: tokens of one block.
        max_num_batched_tokens: most tokens of one step.
        max_num_seqs: most sequences of one step.
        quantized: how matrices are stored, where not as `element_bytes` says.
        formats: the matrices that are stored in blocks, and how.
        fused: whether a step is computed by our kernels of GPUs.
        adapters: LoRA adapters beside the model; None: none are served.
        kv_cache_memory_bytes: size of the cache, where it is not what the sums leave.
        num_blocks: blocks of the cache, the null block included, where neither decides.
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
    adapters: AdapterNumbers | None = None


@dataclass(frozen=True)
class MemoryUse:
    """How one device's memory is used: on the stage whose cache has the least room.

    Attributes:
        weights: bytes, on the stage that has most.
        activations: bytes that a step holds beside weights and cache.
        allowances: bytes kept free for everything else.
        kv_cache: bytes left for the cache; below zero where the model does not fit.
        num_blocks: blocks of the cache, on every device, the null block included.
        adapters: bytes that LoRA adapters may take, on the stage where it is most.
    """

    weights: int
    activations: int
    allowances: int
    kv_cache: int
    num_blocks: int
    adapters: int = 0

    @property
    def usable_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return usable_blocks(self.num_blocks)


def memory_use(config: ModelConfig, numbers: Numbers, device: Device) -> MemoryUse:
    """How a model uses the memory of each device that an engine of it is spread over."""
    split = device.sharding
    activations = activation_bytes(
        config,
        numbers.max_num_batched_tokens,
        numbers.max_num_seqs,
        numbers.element_bytes,
        split,
        numbers.fused,
    )
    blocks = stage_block_bytes(config, numbers, split)
    weights = [
        stage_weight_bytes(config, stage, numbers.element_bytes, split, numbers.quantized, numbers.formats)
        for stage in range(split.pipeline)
    ]
    adapters = stage_adapter_bytes(config, numbers, split)
    fixed_bytes = numbers.kv_cache_memory_bytes
    kv_bytes = [
        kv_cache_bytes(device, of_weights + of_adapters, activations) if fixed_bytes is None else fixed_bytes
        for of_weights, of_adapters in zip(weights, adapters, strict=True)
    ]
    stage = min(range(split.pipeline), key=lambda index: kv_bytes[index] / blocks[index])
    num_blocks = max(kv_bytes[stage] // blocks[stage], 0) if numbers.num_blocks is None else numbers.num_blocks
    return MemoryUse(max(weights), activations, device.allowances, kv_bytes[stage], num_blocks, max(adapters))


def model_cache_groups(config: ModelConfig, block_size: int, kv: KVFormat, tensor: int = 1) -> tuple[CacheGroup, ...]:
    """The groups of layers that share block tables, on one device.

    Args:
        block_size: tokens of one block.
        kv: how the cache stores numbers.
        tensor: devices that each layer is spread over.
    """
    return cache_groups(layer_caches(config, tensor), block_size, kv)


def layer_caches(config: ModelConfig, tensor: int = 1) -> list[LayerCache]:
    """What each layer keeps, on one of `tensor` devices that share it."""
    specs: dict[int, LayerCache] = {}
    for layer in config.layers:
        if id(layer.attention) not in specs:
            specs[id(layer.attention)] = _sharded(layer.cache, tensor)
    return [specs[id(layer.attention)] for layer in config.layers]


def stage_block_bytes(config: ModelConfig, numbers: Numbers, split: Sharding) -> list[int]:
    """One block of the KV cache, on each stage. Block tables are the whole model's, so a stage holds its layers' part
    of every group."""
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
    """What the stage with `layers` has of each group; tables have as many blocks as everywhere.

    Args:
        specs: what each layer of the model keeps, on one device.
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
    """One block of the KV cache: of so many tokens, or of so much of a state, whichever is more."""
    block = bytes_per_position(groups) * block_size
    parts = [-(-group.state_bytes // group.blocks_per_sequence) for group in groups if group.kind == "state"]
    return aligned(max(block, *parts)) if parts else block


def stage_adapter_bytes(config: ModelConfig, numbers: Numbers, split: Sharding) -> list[int]:
    """What LoRA adapters may take, on each stage."""
    adapters = numbers.adapters
    if adapters is None:
        return [0] * split.pipeline
    each = adapter_bytes(config, adapters.rank, adapters.element_bytes, split, numbers.formats, adapters.target_modules)
    return [adapters.count * size for size in each]


def kv_cache_bytes(device: Device, weights: int, activations: int) -> int:
    """What is left for the KV cache beside weights, those of adapters among them; zero or below when the model does not
    fit."""
    available = int(device.memory_bytes * device.utilization) - weights - activations - device.allowances
    return min(available, CPU_KV_CACHE_LIMIT) if device.on_cpu else available


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, step_tokens: int, block_size: int, limit: int
) -> int:
    """The longest sequence of at most `limit` tokens that `num_blocks` usable blocks hold, computed `step_tokens` at a
    time."""

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
    """One rank's share. KV heads are split, or replicated where they are fewer than the devices; latent vectors are
    replicated, and of states the tensors without a dimension to split."""
    if spec.kind == "tokens":
        heads = spec.num_kv_heads if spec.latent else -(-spec.num_kv_heads // tensor)
        return replace(spec, num_kv_heads=heads)
    tensors = []
    for each in spec.tensors:
        shape = [-(-size // tensor) if dim == each.shard_dim else size for dim, size in enumerate(each.shape)]
        tensors.append(replace(each, shape=tuple(shape)))
    return StateSpec(tuple(tensors))
