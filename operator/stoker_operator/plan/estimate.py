"""Estimate of an engine's memory use, and of the maximum sequence length that fits.

The calculation is that of Stoker's engine (`stoker_engine.sizing.memory`). On an accelerator it includes estimated
allowances, so if memory limits the length, the length is chosen with a margin: an engine does not start with a length
that does not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from stoker_engine.sizing.cache_groups import blocks_per_sequence
from stoker_engine.sizing.memory import (
    GIB,
    AdapterNumbers,
    Device,
    MemoryUse,
    Numbers,
    longest_sequence,
    memory_use,
    model_cache_groups,
    stage_adapter_bytes,
    stage_block_bytes,
    weight_bytes,
)
from stoker_engine.sizing.weight_sizes import ONE_DEVICE, Sharding
from stoker_operator.plan.engine_settings import EngineSettings
from stoker_operator.plan.model_shapes import Shape

#: Values of `Bench.margin` for Stoker's engine, and for vLLM, which accounts for memory differently. They do not cover
#: all errors: vLLM's logs have shown a third more room than predicted, and a third less.
MARGIN: Final = 0.03
FOREIGN_MARGIN: Final = 0.10

#: Minimum useful length in tokens: if memory limits sequences to less, the model does not fit. A model's own maximum
#: may be less.
SHORTEST: Final = 2048


@dataclass(frozen=True)
class Estimate:
    """Memory use of one engine. If a device's memory is not known, only the use by weights and adapters is estimated.

    Attributes:
        weight_bytes_per_gpu: bytes of weights on the accelerator that holds most.
        kv_tokens_per_copy: capacity of an engine's KV cache in tokens.
        kv_blocks: number of blocks of that cache, including the null block.
        kv_bytes_per_gpu: bytes for the KV cache on the accelerator with the least room.
        adapter_bytes_per_gpu: bytes of LoRA adapters on the accelerator that holds most.
        activation_bytes_per_gpu: bytes of a step's activations and logits.
        reserved_bytes_per_gpu: bytes kept free for everything else.
        usable_bytes_per_gpu: bytes of an accelerator's memory that the engine may use.
        adapters: the adapters in the estimate; None if none are served.
        max_model_len: maximum length of a sequence in tokens, prompt and output.
        max_concurrency: number of sequences of that length that an engine's cache holds at once.
    """

    weight_bytes_per_gpu: int
    kv_tokens_per_copy: int | None = None
    kv_blocks: int | None = None
    max_model_len: int | None = None
    max_concurrency: int | None = None
    kv_bytes_per_gpu: int | None = None
    adapter_bytes_per_gpu: int = 0
    activation_bytes_per_gpu: int = 0
    reserved_bytes_per_gpu: int = 0
    usable_bytes_per_gpu: int | None = None
    adapters: AdapterNumbers | None = None


@dataclass(frozen=True)
class Bench:
    """Inputs of an engine's estimate.

    Attributes:
        shape: the model.
        numbers: element sizes and limits of a step.
        settings: the engine's settings.
        memory_bytes: memory of one accelerator, or a rank's share of the container's memory; None if not known.
        on_cpu: whether the engine runs on a CPU.
        margin: margin of error on accelerators: fraction of the KV blocks that stays unused when the planner chooses
            the length.
        sharers: number of ranks that share the container's memory, on a CPU.
    """

    shape: Shape
    numbers: Numbers
    settings: EngineSettings
    memory_bytes: int | None
    on_cpu: bool
    margin: float = MARGIN
    sharers: int = 1

    @property
    def wanted_len(self) -> int:
        """Requested maximum length: as stated, or else the model's default; at most the model's own maximum.

        A longer stated length is refused independently of memory.
        """
        config = self.shape.config
        return min(self.settings.max_model_len or config.default_model_len, config.longest_model_len)

    @cached_property
    def weights(self) -> int:
        """Total bytes of the weights."""
        numbers = self.numbers
        return weight_bytes(
            self.shape.config, numbers.element_bytes, quantized=numbers.quantized, formats=numbers.formats
        )


class Problem(NamedTuple):
    """Why an engine cannot run in this way.

    Attributes:
        reason: CamelCase reason.
        message: a sentence.
        length: maximum sequence length in tokens that would fit; 0 if none does, or if it is not known.
    """

    reason: str
    message: str
    length: int = 0


def estimate(bench: Bench, sharding: Sharding) -> tuple[Estimate, Problem | None]:
    """Return the memory use of one engine, and why it cannot run, or None without a known reason."""
    config, settings, numbers = bench.shape.config, bench.settings, bench.numbers
    if bench.memory_bytes is None:
        weights = weight_bytes(
            config, numbers.element_bytes, sharding=sharding, quantized=numbers.quantized, formats=numbers.formats
        )
        found = Estimate(weights, max_model_len=settings.max_model_len)
        return replace(found, **_of_adapters(numbers, max(stage_adapter_bytes(config, numbers, sharding)))), None
    device = Device(bench.memory_bytes, settings.utilization, bench.on_cpu, sharding)
    use = memory_use(config, numbers, device)
    step, size = settings.max_num_batched_tokens, numbers.block_size
    groups = model_cache_groups(config, size, numbers.kv, sharding.tensor)

    def longest(num_blocks: int, limit: int) -> int:
        return longest_sequence(groups, num_blocks, step, size, limit)

    if use.usable_blocks < 1:
        found = Estimate(use.weights, 0, 0, 0, 0, 0, **_parts(numbers, use, device))
        return found, Problem("DoesNotFit", _too_large(use, device, bench))
    wanted_len = bench.wanted_len
    exact = bench.on_cpu or numbers.num_blocks is not None or numbers.kv_cache_memory_bytes is not None
    spare = use.usable_blocks if exact or settings.max_model_len else int(use.usable_blocks * (1 - bench.margin))
    length = longest(spare, wanted_len)
    if length < wanted_len and not settings.max_model_len:
        # The engine gets this length as an argument, and may need less memory for CUDA graphs of shorter sequences.
        use = memory_use(config, replace(numbers, max_model_len=length), device)
    needed = blocks_per_sequence(groups, max(length, 1), step, size)
    # Layers with a sliding window or a recurrent state keep less than the whole sequence, so that the capacity in
    # tokens follows from the number of whole sequences.
    every_token = len(groups) == 1 and groups[0].kind == "tokens"
    tokens = use.usable_blocks * size if every_token else use.usable_blocks * length // needed
    at_once = use.usable_blocks // needed if length else 0
    parts = _parts(numbers, use, device)
    found = Estimate(use.weights, tokens, use.num_blocks, length, at_once, use.kv_cache, **parts)
    if settings.max_model_len and length < wanted_len:
        message = f"the KV cache of an engine holds {tokens:,} tokens, and one sequence of {wanted_len:,} does not fit"
        return found, Problem("MaxModelLenDoesNotFit", message, length)
    if length < min(SHORTEST, wanted_len):
        message = f"{_too_large(use, device, bench, fits=True)}: there is room for sequences of {length:,} tokens only"
        return found, Problem("DoesNotFit", message, length)
    return found, None


def could_hold(bench: Bench, devices: int) -> bool:
    """Return whether the weights alone may fit into the total memory of `devices`.

    This is a quick test: the model may still not fit.
    """
    if bench.memory_bytes is None:
        return True
    return bench.weights <= devices * bench.memory_bytes * bench.settings.utilization


def needed_bytes(bench: Bench, sharding: Sharding = ONE_DEVICE) -> int:
    """Return the memory in bytes that each device must have for one sequence of the stated length.

    If no length is stated, it is `SHORTEST` tokens, or the model's maximum if that is less.
    """
    size, step = bench.numbers.block_size, bench.settings.max_num_batched_tokens
    groups = model_cache_groups(bench.shape.config, size, bench.numbers.kv, sharding.tensor)
    length = min(bench.settings.max_model_len or SHORTEST, bench.shape.config.longest_model_len)
    num_blocks = 1 + blocks_per_sequence(groups, length, step, size)
    cache = num_blocks * max(stage_block_bytes(bench.shape.config, bench.numbers, sharding))
    device = Device(0, 1.0, bench.on_cpu, sharding)
    use = memory_use(bench.shape.config, replace(bench.numbers, num_blocks=num_blocks), device)
    return math.ceil(
        (use.weights + use.adapters + use.activations + use.allowances + cache) / bench.settings.utilization
    )


def _parts(numbers: Numbers, use: MemoryUse, device: Device) -> dict[str, Any]:
    return {
        **_of_adapters(numbers, use.adapters),
        "activation_bytes_per_gpu": use.activations,
        "reserved_bytes_per_gpu": use.allowances,
        "usable_bytes_per_gpu": int(device.memory_bytes * device.utilization),
    }


def _of_adapters(numbers: Numbers, size: int) -> dict[str, Any]:
    return {"adapter_bytes_per_gpu": size, "adapters": numbers.adapters}


def gib(size: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / GIB:,.1f} GiB"


def _too_large(use: MemoryUse, device: Device, bench: Bench, *, fits: bool = False) -> str:
    usable = f"{gib(device.memory_bytes * device.utilization)}, {device.utilization:.0%} of "
    usable += f"a rank's share (1 of {bench.sharers}) of " if bench.sharers > 1 else ""
    usable += "the container's memory" if device.on_cpu else "an accelerator's memory"
    adapters = bench.numbers.adapters
    held = f"adapters {gib(use.adapters)} ({adapters}) + " if adapters else ""
    parts = f"weights {gib(use.weights)} + {held}activations {gib(use.activations)} + {gib(use.allowances)} kept free"
    return f"{parts} {'nearly fill' if fits else 'exceed'} {usable}"
