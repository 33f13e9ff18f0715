"""What a runtime computes on an accelerator: dtypes, dtypes of the KV cache, quantizations.

The catalogue says it (`Catalogue.support`). What it does not say is not judged here.
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

#: Methods whose weights come out of a training step or a calibration, so that a checkpoint has them or has not.
_NEEDS_CHECKPOINT: Final = ("awq", "gptq", "compressed-tensors", "fbgemm_fp8", "modelopt", "modelopt_fp4")


def unsupported(workload: Workload, catalogue: Catalogue) -> Iterator[Refusal]:
    """What the spec requires of the runtime and it does not support on the accelerator."""
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
            f"runtime {engine.runtime} has no {value} on {key}",
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
    """The same with another runtime, whose image is its own."""
    return Proposal(f"use runtime: {name}", {"engine": {"runtime": name, "image": None}})


def mismatched(workload: Workload, shape: Shape) -> Iterator[Refusal]:
    """What the spec makes of a checkpoint that is quantized in another way, or not at all."""
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
            f"{engine.quantization} is requested, and the checkpoint is quantized by {shape.method}",
            Proposal("name another model"),
        )
    elif shape.is_gguf and requested not in ("", "gguf"):
        yield mismatch(
            f"{engine.quantization} is requested, and the file is quantized: its weights are {shape.formats.names}",
            Proposal("name a model whose weights are not"),
        )
    elif requested and not stored and not shape.is_gguf and not _is_done_on_load(engine.runtime, engine.quantization):
        yield mismatch(
            f"{engine.quantization} needs a checkpoint that was quantized so, and this one is not",
            Proposal("name a model whose weights are"),
            *(
                Proposal(
                    f"use a method that quantizes when it loads, {method}", {"engine": {"quantization": method}}, method
                )
                for method in (tuple(ON_LOAD) if engine.runtime == "stoker" else ("fp8",))
            ),
        )


def _is_done_on_load(runtime: str, method: str | None) -> bool:
    return method in ON_LOAD if runtime == "stoker" else canonical_method(method or "") not in _NEEDS_CHECKPOINT


def not_loaded(
    workload: Workload, method: str, catalogue: Catalogue, config: Mapping[str, Any] | None
) -> Iterator[Refusal]:
    """A checkpoint that is quantized in a way that the runtime does not load on the accelerator.

    Args:
        workload: what is planned.
        method: how it is quantized; empty: it is not.
        catalogue: what runtimes load.
        config: the model's config.json; None: it is not known.
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
            *([Proposal(f"use one by {', '.join(allowed)}")] if allowed else []),
            *map(other_runtime, runtimes),
        ),
        "use another model",
    )


def unquantized(config: Mapping[str, Any] | None) -> Iterator[Proposal]:
    """The model whose weights are not quantized, where it is known what that is."""
    plain = None if config is None else without_quantization(config)
    yield Proposal(UNQUANTIZED_ONE, None if plain is None else {}, config=plain)


def not_read(
    workload: Workload, config: Mapping[str, Any], elsewhere: Callable[[], Iterable[Proposal]]
) -> Iterator[Refusal]:
    """What our engine refuses at its start of a checkpoint that is quantized, or is to be, and whose shape it does not
    tell: in a way that it does not read, or for transformers' own modules.

    Args:
        workload: what is planned.
        config: the model's config.json; empty where it is not known.
        elsewhere: makes the proposals of other runtimes.
    """
    try:
        names = own_modules(config)
        reason, _, remedy = (why_not_loaded(config), "", UNQUANTIZED_ONE) if names else _unread(config).rpartition("; ")
    except ModelError:
        return  # said where the model's shape is read
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
    """The engine's remedy, planned where it is the model that is not quantized."""
    if UNQUANTIZED_ONE not in remedy:
        yield Proposal(remedy)
        return
    yield from unquantized(config)
    if "--quantization" in remedy:
        words = f"{UNQUANTIZED_ONE} with spec.engine.quantization int8"
        yield Proposal(words, {"engine": {"quantization": "int8"}}, config=without_quantization(config))


def _unread(config: Mapping[str, Any]) -> str:
    """Why a family's checkpoint is quantized in a way that is not read, and behind a semicolon the remedy; empty: it is
    read."""
    try:
        quantization = read_quantization(config)
        if quantization is not None:
            for name in config.get("architectures") or ():
                refuse_transposed(str(name), quantization.method)
    except ModelError as error:
        return str(error) if "; " in str(error) else f"{error}; {UNQUANTIZED_ONE}"
    return ""


def scales_not_taken(workload: Workload, config: Mapping[str, Any]) -> Iterator[Refusal]:
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
        yield Refusal(
            "spec.engine.kvCacheDtype",
            "fp8_e5m2 has no scales, and the checkpoint states scales for fp8_e4m3 (kv_cache_scheme)",
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
    """What is planned and the runtime's release does not do yet.

    Args:
        workload: what is planned.
        method: how the checkpoint is quantized; empty where it is not, or where that is not known.
        catalogue: what the release does.
        alternatives: finds the runtimes that would be accepted instead.
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
    quantization = engine.quantization or method
    if release.quantizations is not None and quantization and quantization not in release.quantizations:
        lacks.append(f"loads no weights quantized by {quantization}")
    key = workload.hardware.accelerator
    found = [f"{lack}, and will refuse to start" for lack in lacks]
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
    """Whether `runtime` is known to have `method` on the accelerator called `key`."""
    return method in (_allowed(catalogue, runtime, key, "quantization") or ())


def _allowed(catalogue: Catalogue, runtime: str, key: str, field: str) -> Sequence[str] | None:
    known = catalogue.support(runtime, key)
    return {
        "dtype": known.dtypes,
        "kvCacheDtype": known.kv_cache_dtypes,
        "quantization": known.quantizations,
    }[field]
