"""What a runtime computes on an accelerator: dtypes, dtypes of the KV cache, quantizations.

The catalogue says it (`Catalogue.support`). What it does not say is not judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

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


def mismatched(workload: Workload, shape: Shape, catalogue: Catalogue) -> Iterator[Violation]:
    """What the spec, or the runtime, makes of a checkpoint that is quantized in another way, or not at all."""
    engine, key = workload.engine, workload.hardware.accelerator
    asked = canonical_method(engine.quantization) if engine.quantization else ""
    stored = canonical_method(shape.method)
    if asked and stored and asked != stored:
        yield Violation(
            "spec.engine.quantization",
            f"{engine.quantization} is requested, and the checkpoint is quantized by {shape.method}",
            "remove it, or name another model",
            reason="QuantizationMismatch",
        )
    if asked in _NEEDS_CHECKPOINT and not stored:
        yield Violation(
            "spec.engine.quantization",
            f"{engine.quantization} needs a checkpoint that was quantized so, and this one is not",
            "remove it, name a model whose weights are, or use a method that quantizes when it loads, such as fp8",
            reason="QuantizationMismatch",
        )
    allowed = catalogue.support(engine.runtime, key).quantizations
    if stored and not asked and allowed is not None and stored not in {canonical_method(each) for each in allowed}:
        others = [
            other
            for other in catalogue.runtimes
            if stored in {canonical_method(each) for each in _allowed(catalogue, other, key, "quantization") or ()}
        ]
        remedy = " or ".join(["use the unquantized model", *(f"runtime: {other}" for other in others)])
        yield Violation(
            "spec.model.source",
            f"the checkpoint is quantized by {shape.method}, which runtime {engine.runtime} does not load on {key}",
            remedy,
            reason="UnsupportedQuantization",
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
    lacks = []
    used = 1 if workload.hardware.accelerator == CPU else workload.sizes.used
    if release.devices is not None and used > release.devices:
        lacks.append(f"drives {release.devices} accelerator, not {used}")
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
