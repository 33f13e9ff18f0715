"""What a runtime computes on an accelerator: dtypes, dtypes of the KV cache, quantizations.

The catalogue says it (`Catalogue.support`). What it does not say is not judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.architectures.quantization.stated import stated_quantization
from stoker_engine.contract.errors import ModelError
from stoker_engine.sizing.quantized_weights import canonical_method
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.api.v1alpha1.workload import Workload
from stoker_operator.api.violation import Violation
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import Shape

#: Methods whose weights come out of a training step or a calibration, so that a checkpoint has them or has not.
_NEEDS_CHECKPOINT: Final = ("awq", "gptq", "compressed-tensors", "fbgemm_fp8", "modelopt", "modelopt_fp4")


def unsupported(workload: Workload, catalogue: Catalogue) -> Iterator[Violation]:
    """What the spec requires of the runtime and it does not support on the accelerator."""
    engine, key = workload.engine, workload.hardware.accelerator
    known = catalogue.support(engine.runtime, key)

    def judge(field: str, value: str | None, allowed: Sequence[str] | None, reason: str) -> Iterator[Violation]:
        if value is None or value == "auto" or allowed is None or value in allowed:
            return
        choice = f"use {' or '.join(allowed)}" if allowed else "remove it"
        others = [
            other
            for other in catalogue.runtimes
            if other != engine.runtime and value in (_allowed(catalogue, other, key, field) or ())
        ]
        remedy = ", or ".join([choice, *(f"runtime: {other}" for other in others)])
        yield Violation(
            f"spec.engine.{field}", f"runtime {engine.runtime} has no {value} on {key}", remedy, reason=reason
        )

    yield from judge("dtype", engine.dtype, known.dtypes, "UnsupportedDtype")
    yield from judge("kvCacheDtype", engine.kv_cache_dtype, known.kv_cache_dtypes, "UnsupportedKVCacheDtype")
    yield from judge("quantization", engine.quantization, known.quantizations, "UnsupportedQuantization")


def mismatched(workload: Workload, shape: Shape) -> Iterator[Violation]:
    """What the spec makes of a checkpoint that is quantized in another way, or not at all."""
    engine = workload.engine
    asked = canonical_method(engine.quantization) if engine.quantization else ""
    stored = canonical_method(shape.method)
    if asked and stored and asked != stored:
        yield Violation(
            "spec.engine.quantization",
            f"{engine.quantization} is requested, and the checkpoint is quantized by {shape.method}",
            "remove it, or name another model",
            reason="QuantizationMismatch",
        )
    elif shape.is_gguf and asked not in ("", "gguf"):
        yield Violation(
            "spec.engine.quantization",
            f"{engine.quantization} is requested, and the file is quantized: its weights are {shape.formats.names}",
            "remove it, or name a model whose weights are not",
            reason="QuantizationMismatch",
        )
    elif asked and not stored and not shape.is_gguf and not _is_done_on_load(engine.runtime, engine.quantization):
        on_load = " or ".join(ON_LOAD) if engine.runtime == "stoker" else "such as fp8"
        yield Violation(
            "spec.engine.quantization",
            f"{engine.quantization} needs a checkpoint that was quantized so, and this one is not",
            f"remove it, name a model whose weights are, or use a method that quantizes when it loads, {on_load}",
            reason="QuantizationMismatch",
        )


def _is_done_on_load(runtime: str, method: str | None) -> bool:
    return method in ON_LOAD if runtime == "stoker" else canonical_method(method or "") not in _NEEDS_CHECKPOINT


def not_loaded(workload: Workload, method: str, catalogue: Catalogue) -> Iterator[Violation]:
    """A checkpoint that is quantized in a way that the runtime does not load on the accelerator.

    Args:
        workload: what is planned.
        method: how it is quantized; empty: it is not.
        catalogue: what runtimes load.
    """
    engine, key = workload.engine, workload.hardware.accelerator
    allowed = catalogue.support(engine.runtime, key).quantizations
    stored = canonical_method(method)
    if not stored or allowed is None or stored in {canonical_method(each) for each in allowed}:
        return
    others = [
        other
        for other in catalogue.runtimes
        if stored in {canonical_method(each) for each in _allowed(catalogue, other, key, "quantization") or ()}
    ]
    models = f"use the unquantized model, or one by {', '.join(allowed)}" if allowed else "use the unquantized model"
    yield Violation(
        "spec.model.source",
        f"the checkpoint is quantized by {method}, which runtime {engine.runtime} does not load on {key}",
        ", or ".join([models, *(f"runtime: {other}" for other in others)]),
        reason="UnsupportedQuantization",
    )


def scales_not_taken(workload: Workload, config: Mapping[str, Any]) -> Iterator[Violation]:
    """A type of the key-value cache that our engine does not have with a checkpoint that states scales for another.

    Args:
        workload: what is planned.
        config: the model's config.json; empty where it is not known.
    """
    engine = workload.engine
    try:
        scheme = (stated_quantization(config) or {}).get("kv_cache_scheme")
    except ModelError:
        return  # said where the model's shape is read
    static = isinstance(scheme, Mapping) and bool(scheme) and not scheme.get("dynamic")
    if engine.runtime == "stoker" and engine.kv_cache_dtype == "fp8_e5m2" and static:
        yield Violation(
            "spec.engine.kvCacheDtype",
            "fp8_e5m2 has no scales, and the checkpoint states scales for fp8_e4m3 (kv_cache_scheme)",
            "use fp8",
            reason="UnsupportedKVCacheDtype",
        )


def warnings(workload: Workload, method: str, catalogue: Catalogue) -> Iterator[str]:
    """What is planned and the runtime's release does not do yet.

    Args:
        workload: what is planned.
        method: how the checkpoint is quantized; empty where it is not, or where that is not known.
        catalogue: what the release does.
    """
    engine = workload.engine
    release = catalogue.releases.get(engine.runtime)
    if release is None:
        return
    lacks, on_cpu = [], workload.hardware.accelerator == CPU
    used = workload.sizes.used
    if release.devices is not None and used > release.devices:
        lacks.append(f"drives {release.devices} {'rank' if on_cpu else 'accelerator'}, not {used}")
    if release.kv_cache_dtypes is not None and (engine.kv_cache_dtype or "auto") not in release.kv_cache_dtypes:
        lacks.append(f"has no key-value cache of {engine.kv_cache_dtype}")
    asked = engine.quantization or method
    if release.quantizations is not None and asked and asked not in release.quantizations:
        lacks.append(f"loads no weights quantized by {asked}")
    others = " or ".join(sorted(other for other in catalogue.runtimes if other != engine.runtime))
    for lack in lacks:
        yield f"the {engine.runtime} engine of this release {lack}, and will refuse to start; use runtime {others}"
    key = workload.hardware.accelerator
    if asked and release.quantized_on is not None and catalogue.accelerator(key).arch not in release.quantized_on:
        yield (
            f"the {engine.runtime} engine of this release has no kernels for weights quantized by {asked} on {key}: it "
            f"dequantizes them in every step, which is slow; use runtime {others}"
        )


def can_quantize(catalogue: Catalogue, runtime: str, key: str, method: str) -> bool:
    """Whether `runtime` is known to have `method` on the accelerator called `key`."""
    return method in (_allowed(catalogue, runtime, key, "quantization") or ())


def _allowed(catalogue: Catalogue, runtime: str, key: str, field: str) -> Sequence[str] | None:
    known = catalogue.support(runtime, key)
    return {
        "dtype": known.dtypes,
        "kvCacheDtype": known.kv_cache_dtypes,
        "quantization": known.quantizations,
    }[field]
