"""What will be in an accelerator's memory, and how long a sequence may be there.

The sums are the engine's own (`stoker_engine.sizing.memory`). On an accelerator they rest on allowances, so a length
that memory limits is chosen with a margin to spare: an engine that is given a length that does not fit would not start.
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

#: By how much a prediction on a GPU may be wrong, of our engine and of others, which count in their own ways. Logs of
#: vLLM's have been seen with a third more room than predicted, and with a third less.
MARGIN: Final = 0.03
FOREIGN_MARGIN: Final = 0.10

#: A length that memory limits to less than this is useless, unless the model's own is less.
SHORTEST: Final = 2048


@dataclass(frozen=True)
class Estimate:
    """One engine of a model in memory. What concerns the KV cache is None where the memory is not known.

    Attributes:
        weight_bytes_per_gpu: weights on the accelerator that holds most.
        kv_tokens_per_copy: tokens that the KV cache of an engine holds.
        kv_blocks: blocks of that cache, the null block included.
        kv_bytes_per_gpu: what is left for it on the accelerator that has least room.
        adapter_bytes_per_gpu: what LoRA adapters may take of the accelerator on which it is most.
        adapters: those that are counted; None: none are served.
        max_model_len: the longest sequence, prompt and output.
        max_concurrency: sequences of that length that the cache of an engine holds at once.
    """

    weight_bytes_per_gpu: int
    kv_tokens_per_copy: int | None = None
    kv_blocks: int | None = None
    max_model_len: int | None = None
    max_concurrency: int | None = None
    kv_bytes_per_gpu: int | None = None
    adapter_bytes_per_gpu: int = 0
    adapters: AdapterNumbers | None = None


@dataclass(frozen=True)
class Bench:
    """What one engine is measured on.

    Attributes:
        shape: the model.
        numbers: bytes of its numbers, and what a step may hold.
        settings: the engine's.
        memory_bytes: of one accelerator, or a rank's part of the container's; None where it is not known.
        on_cpu: whether it is a CPU.
        margin: share of the blocks that a length leaves unused where memory limits it.
        sharers: ranks that share the container's memory, on a CPU.
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
        """The longest sequence that is to be served: as stated, or else the model's own. What is beyond the model's
        own length is refused as such, whatever the memory."""
        config = self.shape.config
        return min(self.settings.max_model_len or config.default_model_len, config.longest_model_len)

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights together."""
        numbers = self.numbers
        return weight_bytes(
            self.shape.config, numbers.element_bytes, quantized=numbers.quantized, formats=numbers.formats
        )


class Problem(NamedTuple):
    """Why an engine cannot run so.

    Attributes:
        reason: one CamelCase word.
        message: a sentence.
        length: the longest sequence that would fit; 0 where none does.
    """

    reason: str
    message: str
    length: int = 0


def estimate(bench: Bench, sharding: Sharding) -> tuple[Estimate, Problem | None]:
    """One engine in memory, and the objection to it; None where there is none."""
    config, settings, numbers = bench.shape.config, bench.settings, bench.numbers
    if bench.memory_bytes is None:
        weights = weight_bytes(
            config, numbers.element_bytes, sharding=sharding, quantized=numbers.quantized, formats=numbers.formats
        )
        found = Estimate(weights, max_model_len=settings.max_model_len)
        return replace(found, **_of_adapters(numbers, max(stage_adapter_bytes(config, numbers, sharding)))), None
    device = Device(bench.memory_bytes, settings.utilization, bench.on_cpu, sharding)
    use = memory_use(config, numbers, device)
    of_adapters = _of_adapters(numbers, use.adapters)
    step, size = settings.max_num_batched_tokens, numbers.block_size
    groups = model_cache_groups(config, size, numbers.kv, sharding.tensor)

    def longest(num_blocks: int, limit: int) -> int:
        return longest_sequence(groups, num_blocks, step, size, limit)

    if use.usable_blocks < 1:
        found = Estimate(use.weights, 0, 0, 0, 0, 0, **of_adapters)
        return found, Problem("DoesNotFit", _too_large(use, device, bench))
    wanted_len = bench.wanted_len
    exact = bench.on_cpu or numbers.num_blocks is not None or numbers.kv_cache_memory_bytes is not None
    spare = use.usable_blocks if exact or settings.max_model_len else int(use.usable_blocks * (1 - bench.margin))
    length = longest(spare, wanted_len)
    needed = blocks_per_sequence(groups, max(length, 1), step, size)
    # Layers with a window or a state keep less than the whole sequence, so only whole sequences can be counted.
    every_token = len(groups) == 1 and groups[0].kind == "tokens"
    tokens = use.usable_blocks * size if every_token else use.usable_blocks * length // needed
    at_once = use.usable_blocks // needed if length else 0
    found = Estimate(use.weights, tokens, use.num_blocks, length, at_once, use.kv_cache, **of_adapters)
    if settings.max_model_len and length < wanted_len:
        message = f"the KV cache of an engine holds {tokens:,} tokens, and one sequence of {wanted_len:,} does not fit"
        return found, Problem("MaxModelLenDoesNotFit", message, length)
    if length < min(SHORTEST, wanted_len):
        message = f"{_too_large(use, device, bench, fits=True)}: there is room for sequences of {length:,} tokens only"
        return found, Problem("DoesNotFit", message, length)
    return found, None


def could_hold(bench: Bench, devices: int) -> bool:
    """Whether the weights alone are not already too much for so many devices together; quick, and never wrong to say
    no."""
    if bench.memory_bytes is None:
        return True
    return bench.weights <= devices * bench.memory_bytes * bench.settings.utilization


def needed_bytes(bench: Bench, sharding: Sharding = ONE_DEVICE) -> int:
    """The memory that an engine needs on each device, with a sequence of `SHORTEST` tokens."""
    device = Device(0, 1.0, bench.on_cpu, sharding)
    use = memory_use(bench.shape.config, bench.numbers, device)
    size, step = bench.numbers.block_size, bench.settings.max_num_batched_tokens
    groups = model_cache_groups(bench.shape.config, size, bench.numbers.kv, sharding.tensor)
    length = min(bench.settings.max_model_len or SHORTEST, bench.shape.config.longest_model_len)
    block = max(stage_block_bytes(bench.shape.config, bench.numbers, sharding))
    cache = (1 + blocks_per_sequence(groups, length, step, size)) * block
    return math.ceil(
        (use.weights + use.adapters + use.activations + use.allowances + cache) / bench.settings.utilization
    )


def _of_adapters(numbers: Numbers, size: int) -> dict[str, Any]:
    return {"adapter_bytes_per_gpu": size, "adapters": numbers.adapters}


def gib(size: float) -> str:
    """Bytes to read."""
    return f"{size / GIB:,.1f} GiB"


def _too_large(use: MemoryUse, device: Device, bench: Bench, *, fits: bool = False) -> str:
    usable = f"{gib(device.memory_bytes * device.utilization)}, {device.utilization:.0%} of "
    usable += f"a rank's part, one of {bench.sharers}, of " if bench.sharers > 1 else ""
    usable += "the container's memory" if device.on_cpu else "an accelerator's memory"
    adapters = bench.numbers.adapters
    held = f"adapters {gib(use.adapters)} ({adapters}) + " if adapters else ""
    parts = f"weights {gib(use.weights)} + {held}activations {gib(use.activations)} + {gib(use.allowances)} kept free"
    return f"{parts} {'nearly fill' if fits else 'exceed'} {usable}"
