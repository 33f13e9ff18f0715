"""The words after ``stoker serve``: what a spec and its placement say, in the engine's own language.

A pod and `stoker up` get them from here, so that a manifest means the same with and without a cluster. A word in
``spec.engine.args`` is for what has no field. It may repeat what a field says, and never contradict it.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from stoker_engine.contract.argv import flag_name
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import ArgumentError
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.contract.sources import ModelSource
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.plan.placement import Placement

#: Port the engine listens on in a pod.
PORT: Final = 8000

#: Which field of the spec says what an argument of the engine says.
FIELDS: Final = {
    "model": "spec.model.source",
    "served_model_name": "spec.model.servedNames",
    "revision": "spec.model.revision",
    "chat_template": "spec.model.chatTemplate",
    "device": "spec.hardware.accelerator",
    "tensor_parallel_size": "spec.parallelism.tensor",
    "data_parallel_size": "spec.parallelism.data",
    "pipeline_parallel_size": "spec.parallelism",
    "dtype": "spec.engine.dtype",
    "kv_cache_dtype": "spec.engine.kvCacheDtype",
    "max_num_seqs": "spec.engine.maxNumSeqs",
    "max_num_batched_tokens": "spec.engine.maxNumBatchedTokens",
    "max_model_len": "spec.engine.maxModelLen",
    "gpu_memory_utilization": "spec.engine.gpuMemoryUtilizationPercent",
    "enable_prefix_caching": "spec.engine.enablePrefixCaching",
}


def serve_args(
    spec: Spec,
    placement: Placement,
    *,
    chat_template: str | None = None,
    host: str = "0.0.0.0",
    port: int = PORT,
) -> ServeArgs:
    """What ``stoker serve`` is started with.

    Args:
        spec: what the user asks for.
        placement: what was decided about it.
        chat_template: the template's text, or the file it will be found in.
        host, port: where the engine listens.

    Raises:
        Refused: ``spec.engine.args`` has a word the engine does not know, or one that contradicts a field.
    """
    said = _said(spec, placement, chat_template)
    more = _parse_args(spec)
    for name, value in more.items():
        if name in said and said[name] != value:
            field = FIELDS[name]
            raise _refused(f"{flag_name(name)} contradicts {field}, which is {_show(said[name])}", f"set {field}")
    values = {**more, **said, "host": host, "port": port}
    try:
        return ServeArgs(_build(EngineArgs, values), _build(FrontendArgs, values))
    except ArgumentError as error:
        name = error.argument.lstrip("-").replace("-", "_")
        field = FIELDS[name] if name in said and name in FIELDS else "spec.engine.args"
        raise Refused(Violation(field, str(error))) from None


def _said(spec: Spec, placement: Placement, chat_template: str | None) -> dict[str, Any]:
    """The arguments that fields of the spec decide; those that nobody decided are the engine's to choose."""
    source = ModelSource.parse(spec.model.source)
    engine = spec.engine
    percent = engine.gpu_memory_utilization_percent
    said: dict[str, Any] = {
        "model": source.model_argument,
        "served_model_name": tuple(spec.model.served_names or [source.served_name]),
        "revision": spec.model.revision,
        "chat_template": chat_template,
        "dtype": engine.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "gpu_memory_utilization": None if percent is None else percent / 100,
        "enable_prefix_caching": engine.enable_prefix_caching,
    }
    return {name: value for name, value in said.items() if value is not None} | {
        # These are always decided: by the placement, or by a rule that an absent field obeys as well.
        "device": placement.accelerator.device,
        "tensor_parallel_size": placement.tensor,
        "data_parallel_size": placement.data,
        "pipeline_parallel_size": 1,
        "kv_cache_dtype": engine.kv_cache_dtype or "auto",
    }


def _parse_args(spec: Spec) -> dict[str, Any]:
    """The arguments that ``spec.engine.args`` gives, and only those."""
    words = spec.engine.args or []
    if any(word in ("-h", "--help") for word in words):
        raise _refused("--help starts no engine", "remove it")
    absent = object()
    names = [field.name for cls in (EngineArgs, FrontendArgs) for field in dataclasses.fields(cls)]
    # argparse sets a default only where nothing is, so what is still `absent` afterwards was not given.
    namespace = argparse.Namespace(**dict.fromkeys(names, absent))
    try:
        ServeArgs.parser().parse_args(["MODEL", *words], namespace)
    except ArgumentError as error:
        raise _refused(str(error), "see `stoker serve --help`") from None
    except SystemExit:
        raise _refused("--help starts no engine", "remove it") from None
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if value is not absent and name != "model"
    }
    for name in ("host", "port"):
        if name in given:
            raise _refused(f"{flag_name(name)} is not the endpoint's to choose", "remove it; see spec.service.port")
    return given


def _refused(message: str, remedy: str) -> Refused:
    return Refused(Violation("spec.engine.args", message, remedy))


def _build(cls: type[Any], values: dict[str, Any]) -> Any:
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})


def _show(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
