"""Inputs of all parallel layouts of a spec: accelerators, rules of the runtime, and data for the memory estimate."""

from __future__ import annotations

from stoker_common.errors import ModelError
from stoker_engine.architectures.compute_dtype import compute_dtype
from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.sizing.dtype_sizes import element_bytes
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import AdapterNumbers, Numbers
from stoker_engine.sizing.packed_weights import formats_on_gpus
from stoker_engine.sizing.planned_formats import on_load_formats
from stoker_engine.sizing.quantized_weights import usual_weights
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, BLOCK_DTYPES, WeightFormats
from stoker_operator.api.quantity import amount
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.plan.engine_settings import EngineSettings
from stoker_operator.plan.estimate import FOREIGN_MARGIN, MARGIN, Bench
from stoker_operator.plan.model_shapes import Shape
from stoker_operator.plan.options import MIN_CONCURRENCY, ParallelLayout
from stoker_operator.plan.placement import Placement

_MIB = 1024**2
#: Larger memory limits are reduced to this, in bytes.
_MAX_MEMORY = 1 << 60
#: Architectures on which Stoker's GPU kernels do not run, so that weights of GGUF files are dequantized.
_WITHOUT_KERNELS = {"sm_75"}


def layout_of(spec: Spec, placement: Placement, shape: Shape | str, bench: Bench | None) -> ParallelLayout:
    """Return the inputs that all layouts of a spec share.

    vLLM's data-parallel engines of a MoE model share its experts, whether these are distributed whole or split; engines
    of runtime stoker share nothing.
    """
    mixture = isinstance(shape, Shape) and shape.experts > 0
    parallelism = spec.parallelism
    is_stoker, on_cpu = spec.engine.runtime == "stoker", spec.hardware.accelerator == CPU
    return ParallelLayout(
        placement.sizes.used if on_cpu else placement.count,
        placement.nodes,
        bench,
        joint_experts=mixture and not is_stoker,
        whole_experts=placement.expert and (mixture or isinstance(shape, str)),
        can_deal_experts=mixture,
        min_concurrency=(parallelism.min_concurrency if parallelism else None) or MIN_CONCURRENCY,
        max_per_pod=placement.accelerator.max_per_pod,
        divisible=placement.accelerator.topology_label is None and spec.can_share_its_cache,
        is_stoker=is_stoker,
        counted=not on_cpu,
    )


def memory_bytes_of(spec: Spec, placement: Placement) -> int | None:
    """Return the memory of one device in bytes, or None if it is not known.

    On a CPU all ranks of all engines share the container's limit equally. Without a limit the engine uses the machine's
    memory, which the planner does not know.
    """
    if placement.accelerator.memory_mib is not None:
        return placement.accelerator.memory_mib * _MIB
    limits = spec.hardware.resources.limits if spec.hardware.resources else None
    limit = (limits or {}).get("memory")
    if limit is None:
        return None
    return min(max(int(amount(limit)), 0), _MAX_MEMORY) // placement.sizes.used


def bench_of(
    spec: Spec, shape: Shape, settings: EngineSettings, memory: int | None, placement: Placement
) -> tuple[str, Bench | None]:
    """Return an empty string and the inputs of an engine's estimate, or why there is no estimate, and None."""
    engine = spec.engine
    on_cpu = spec.hardware.accelerator == CPU
    is_stoker = engine.runtime == "stoker"
    quantized = None
    if engine.quantization and not shape.method and not is_stoker:
        quantized = usual_weights(engine.quantization)
        if quantized is None:
            return f"the size of weights quantized by {engine.quantization} is not known", None
    is_quantized = bool(shape.method or engine.quantization) and is_stoker
    dtype = compute_dtype(engine.dtype, shape.config.dtype or "bfloat16", quantized=is_quantized, on_cpu=on_cpu)
    if not is_stoker and engine.dtype in (None, "auto") and element_bytes(dtype) > 2:
        dtype = "bfloat16"  # vLLM loads float32 checkpoints in 16 bits, unless ``--dtype`` states another dtype
    try:
        arch = CPU if on_cpu else placement.accelerator.arch
        formats = _formats(engine.quantization, shape, dtype, arch) if is_stoker else _files_formats(shape)
    except ModelError as error:
        return str(error), None
    numbers = Numbers(
        element_bytes=element_bytes(dtype),
        kv=kv_format(engine.kv_cache_dtype or "auto", dtype),
        block_size=settings.block_size,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        quantized=quantized,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        num_blocks=settings.num_blocks,
        formats=formats,
        fused=is_stoker and not on_cpu,
        has_graphs=settings.has_graphs,
        max_model_len=settings.max_model_len,
        adapters=_adapters(settings, element_bytes(dtype), on_cpu),
    )
    sharers = placement.sizes.used if on_cpu else 1
    return "", Bench(shape, numbers, settings, memory, on_cpu, MARGIN if is_stoker else FOREIGN_MARGIN, sharers)


def _adapters(settings: EngineSettings, bytes_of_one: int, on_cpu: bool) -> AdapterNumbers | None:
    """Return the adapters in the memory of a device: on a CPU all resident ones, on a GPU those of one step."""
    if not settings.max_loras:
        return None
    count = settings.num_resident_adapters if on_cpu else settings.max_loras
    return AdapterNumbers(count, settings.max_lora_rank, bytes_of_one, settings.lora_target_modules)


def _formats(quantization: str | None, shape: Shape, dtype: str, arch: str | None) -> WeightFormats:
    """Return the formats in which Stoker's engine stores the weights of a model that it computes in `dtype`."""
    if shape.is_gguf:
        if arch == CPU:
            return shape.formats if dtype in BLOCK_DTYPES else ALL_NUMBERS
        return ALL_NUMBERS if arch in _WITHOUT_KERNELS else formats_on_gpus(shape.formats)
    if not shape.method and quantization in ON_LOAD:
        return on_load_formats(shape.config, quantization, arch == CPU)
    return shape.formats


def _files_formats(shape: Shape) -> WeightFormats:
    """Return the formats in which vLLM stores a model's weights. It is assumed to dequantize GGUF files."""
    return ALL_NUMBERS if shape.is_gguf else shape.formats
