"""Checks of what a runtime supports on an accelerator: dtypes, dtypes of the KV cache, quantization methods.

Most follow from the catalogue's lists (`Catalogue.support`). Values without a list are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.own_modules import UNQUANTIZED_ONE, own_modules, why_not_loaded, why_not_quantized
from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.architectures.quantization.read import read_quantization
from stoker_engine.architectures.quantization.stated import stated_quantization, without_quantization
from stoker_engine.sizing.planned_formats import refuse_transposed
from stoker_engine.sizing.quantized_weights import canonical_method
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.api.v1alpha1.workload import Workload
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import Shape
from stoker_operator.plan.proposals import Proposal, Refusal

#: Methods that cannot quantize a checkpoint when it is loaded.
_NEEDS_CHECKPOINT: Final = ("awq", "gptq", "compressed-tensors", "fbgemm_fp8", "modelopt", "modelopt_fp4")


def unsupported(workload: Workload, catalogue: Catalogue) -> Iterator[Refusal]:
    """Yield a refusal for each value of the spec that the runtime does not support on the accelerator."""
    engine, key = workload.engine, workload.hardware.accelerator
    known = catalogue.support(engine.runtime, key)

    def allowed_only(field: str, value: str | None, allowed: Sequence[str] | None, reason: str) -> Iterator[Refusal]:
        if value is None or value == "auto" or allowed is None or value in allowed:
            return
        runtimes = [
            runtime
            for runtime in catalogue.runtimes
            if runtime != engine.runtime and value in (_allowed(catalogue, runtime, key, field) or ())
        ]
        yield Refusal(
            f"spec.engine.{field}",
            f"runtime {engine.runtime} does not support {value} on {key}",
            reason,
            lambda: (
                *(Proposal(f"use {each}", {"engine": {field: each}}, each) for each in allowed),
                Proposal("remove it", {"engine": {field: None}}),
                *map(other_runtime, runtimes),
            ),
            "use other accelerators, or another model",
        )

    yield from allowed_only("dtype", engine.dtype, known.dtypes, "UnsupportedDtype")
    yield from allowed_only("kvCacheDtype", engine.kv_cache_dtype, known.kv_cache_dtypes, "UnsupportedKVCacheDtype")
    yield from allowed_only("quantization", engine.quantization, known.quantizations, "UnsupportedQuantization")


def other_runtime(name: str) -> Proposal:
    """Propose the same spec with another runtime, and that runtime's default image."""
    return Proposal(f"use runtime: {name}", {"engine": {"runtime": name, "image": None}})


def mismatched(workload: Workload, shape: Shape) -> Iterator[Refusal]:
    """Refuse a quantization method in the spec that does not match the checkpoint's."""
    engine = workload.engine
    requested = canonical_method(engine.quantization) if engine.quantization else ""
    stored = canonical_method(shape.method)

    def mismatch(message: str, *proposals: Proposal) -> Refusal:
        first = Proposal("remove it", {"engine": {"quantization": None}})
        return Refusal(
            "spec.engine.quantization", message, "QuantizationMismatch", lambda: (first, *proposals), proposals[0].text
        )

    if requested and stored and requested != stored:
        yield mismatch(
            f"{engine.quantization} is requested, but the checkpoint is quantized by {shape.method}",
            Proposal("name another model"),
        )
    elif shape.is_gguf and requested not in ("", "gguf"):
        yield mismatch(
            f"{engine.quantization} is requested, but the file is quantized already: its weights are "
            f"{shape.formats.names}",
            Proposal("name a model whose weights are not quantized"),
        )
    elif requested and not stored and not shape.is_gguf and not _is_done_on_load(engine.runtime, engine.quantization):
        yield mismatch(
            f"{engine.quantization} needs a checkpoint that is quantized by it, and this one is not quantized",
            Proposal("name a model whose weights are quantized by it"),
            *(
                Proposal(f"use a method that quantizes on load, {method}", {"engine": {"quantization": method}}, method)
                for method in (tuple(ON_LOAD) if engine.runtime == "stoker" else ("fp8",))
            ),
        )


def _is_done_on_load(runtime: str, method: str | None) -> bool:
    return method in ON_LOAD if runtime == "stoker" else canonical_method(method or "") not in _NEEDS_CHECKPOINT


def not_loaded(
    workload: Workload, method: str, catalogue: Catalogue, config: Mapping[str, Any] | None
) -> Iterator[Refusal]:
    """Refuse a checkpoint with a quantization method that the runtime does not load on the accelerator.

    Args:
        method: quantization method of the checkpoint; empty if none is known.
        config: the model's config.json; None if not known.
    """
    engine, key = workload.engine, workload.hardware.accelerator
    allowed = catalogue.support(engine.runtime, key).quantizations
    stored = canonical_method(method)
    if not stored or allowed is None or stored in {canonical_method(each) for each in allowed}:
        return
    runtimes = [
        runtime
        for runtime in catalogue.runtimes
        if stored in {canonical_method(each) for each in _allowed(catalogue, runtime, key, "quantization") or ()}
    ]
    yield Refusal(
        "spec.model.source",
        f"the checkpoint is quantized by {method}, which runtime {engine.runtime} does not load on {key}",
        "UnsupportedQuantization",
        lambda: (
            *unquantized(config),
            *([Proposal(f"use one quantized by {', '.join(allowed)}")] if allowed else []),
            *map(other_runtime, runtimes),
        ),
        "use another model",
    )


def unquantized(config: Mapping[str, Any] | None) -> Iterator[Proposal]:
    """Propose the model without quantization; it is planned if its config is known."""
    plain = None if config is None else without_quantization(config)
    yield Proposal(UNQUANTIZED_ONE, None if plain is None else {}, config=plain)


def not_read(
    workload: Workload, config: Mapping[str, Any], elsewhere: Callable[[], Iterable[Proposal]]
) -> Iterator[Refusal]:
    """Refuse quantizations that Stoker's engine would refuse when it starts.

    These are methods that it does not read, and any quantization on its Transformers backend.

    Args:
        config: the model's config.json; empty if not known.
        elsewhere: creates proposals to use another runtime.
    """
    try:
        names = own_modules(config)
        reason, _, remedy = (why_not_loaded(config), "", UNQUANTIZED_ONE) if names else _unread(config).rpartition("; ")
    except ModelError:
        return  # reported when the model's shape is read
    if names and workload.engine.quantization:
        yield Refusal(
            "spec.engine.quantization",
            why_not_quantized(names),
            "UnsupportedQuantization",
            lambda: (Proposal("remove it", {"engine": {"quantization": None}}), *elsewhere()),
            "use another model",
        )
    if reason:
        yield Refusal(
            "spec.model.source",
            reason,
            "UnsupportedQuantization",
            lambda: (*_instead(config, remedy), *elsewhere()),
            "use another model",
        )


def _instead(config: Mapping[str, Any], remedy: str) -> Iterator[Proposal]:
    """Propose the engine's remedy; if that is the model without quantization, it is planned."""
    if UNQUANTIZED_ONE not in remedy:
        yield Proposal(remedy)
        return
    yield from unquantized(config)
    if "--quantization" in remedy:
        words = f"{UNQUANTIZED_ONE} with spec.engine.quantization int8"
        yield Proposal(words, {"engine": {"quantization": "int8"}}, config=without_quantization(config))


def _unread(config: Mapping[str, Any]) -> str:
    """Return "REASON; REMEDY" if Stoker's engine does not read the checkpoint's quantization; otherwise empty."""
    try:
        quantization = read_quantization(config)
        if quantization is not None:
            for name in config.get("architectures") or ():
                refuse_transposed(str(name), quantization.method)
    except ModelError as error:
        return str(error) if "; " in str(error) else f"{error}; {UNQUANTIZED_ONE}"
    return ""


def scales_not_taken(workload: Workload, config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse a KV cache of Stoker's engine in fp8_e5m2, which uses no scales, if the checkpoint has static scales.

    Args:
        config: the model's config.json; empty if not known.
    """
    engine = workload.engine
    try:
        scheme = (stated_quantization(config) or {}).get("kv_cache_scheme")
    except ModelError:
        return  # reported when the model's shape is read
    static = isinstance(scheme, Mapping) and bool(scheme) and not scheme.get("dynamic")
    if engine.runtime == "stoker" and engine.kv_cache_dtype == "fp8_e5m2" and static:
        yield Refusal(
            "spec.engine.kvCacheDtype",
            "fp8_e5m2 uses no scales, but the checkpoint has scales for fp8_e4m3 (kv_cache_scheme)",
            "UnsupportedKVCacheDtype",
            lambda: (
                Proposal("use fp8", {"engine": {"kvCacheDtype": "fp8"}}),
                Proposal("remove it", {"engine": {"kvCacheDtype": None}}),
            ),
            "use another model",
        )


def warnings(
    workload: Workload, method: str, catalogue: Catalogue, alternatives: Callable[[], Sequence[str]]
) -> Iterator[str]:
    """Yield a warning for each limit of the runtime's current release (`Release`) that the spec exceeds.

    Args:
        method: quantization method of the checkpoint; empty if none is known.
        alternatives: returns the names of the other runtimes that would accept the spec.
    """
    engine = workload.engine
    release = catalogue.releases.get(engine.runtime)
    if release is None:
        return
    lacks, on_cpu = [], workload.hardware.accelerator == CPU
    used = workload.sizes.used
    if release.devices is not None and used > release.devices:
        lacks.append(f"supports {release.devices} {'rank' if on_cpu else 'accelerator'}, not {used}")
    if release.kv_cache_dtypes is not None and (engine.kv_cache_dtype or "auto") not in release.kv_cache_dtypes:
        lacks.append(f"does not support a KV cache of {engine.kv_cache_dtype}")
    quantization = engine.quantization or method
    if release.quantizations is not None and quantization and quantization not in release.quantizations:
        lacks.append(f"does not load weights quantized by {quantization}")
    key = workload.hardware.accelerator
    found = [f"{lack}, so it refuses to start" for lack in lacks]
    if (
        quantization
        and release.quantized_on is not None
        and catalogue.accelerator(key).arch not in release.quantized_on
    ):
        found.append(
            f"has no kernels for weights quantized by {quantization} on {key}: it dequantizes them in every step, "
            "which is slow"
        )
    named = " or ".join(alternatives()) if found else ""
    remedy = f"; use runtime {named}" if named else ""
    yield from (f"the {engine.runtime} engine of this release {each}{remedy}" for each in found)


def can_quantize(catalogue: Catalogue, runtime: str, key: str, method: str) -> bool:
    """Return whether `runtime` is known to support quantization `method` on the accelerator called `key`."""
    return method in (_allowed(catalogue, runtime, key, "quantization") or ())


def _allowed(catalogue: Catalogue, runtime: str, key: str, field: str) -> Sequence[str] | None:
    known = catalogue.support(runtime, key)
    return {
        "dtype": known.dtypes,
        "kvCacheDtype": known.kv_cache_dtypes,
        "quantization": known.quantizations,
    }[field]
