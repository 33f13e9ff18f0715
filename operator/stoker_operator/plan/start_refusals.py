"""Refusals that Stoker's engine would report when it starts, with the engine's own messages: unsupported options of a
family, activations and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from stoker_common.errors import ModelError
from stoker_engine.architectures import activation, compute_dtype
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.stated import without_quantization
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.plan.model_shapes import Shape
from stoker_operator.plan.proposals import Proposal, Refusal


def refused_at_start(
    spec: Spec, shape: Shape | str, config: Mapping[str, Any], elsewhere: Callable[[], Iterable[Proposal]]
) -> Iterator[Refusal]:
    """Yield the refusals of Stoker's engine for a model of one of its families.

    Args:
        shape: the model's shape, or why it is not known.
        config: the model's config.json; empty if not known.
        elsewhere: creates proposals to use another runtime.
    """
    if spec.engine.runtime != "stoker":
        return
    reason = _option(config) if isinstance(shape, str) else _activation(shape)
    if reason:
        yield Refusal("spec.model.source", reason, "NotSupported", elsewhere, "use another model")
    if isinstance(shape, Shape) and (reason := _dtype(spec, shape)):
        dtypes = ("bfloat16", "float16", "float32")
        yield Refusal(
            "spec.engine.dtype",
            reason.partition("; ")[0],
            "UnsupportedDtype",
            lambda: [Proposal(f"use {name}", {"engine": {"dtype": name}}, also=name) for name in dtypes],
            "use another model",
        )


def _option(config: Mapping[str, Any]) -> str:
    """Return why a family's config is refused; empty if it is accepted, belongs to no family, or is invalid."""
    names = config.get("architectures")
    if not isinstance(names, list) or all(name not in FAMILIES for name in names if isinstance(name, str)):
        return ""
    try:
        ModelConfig.from_dict(without_quantization(config))
    except ModelError as error:
        return str(error)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        pass  # reported when the model's shape is read
    return ""


def _activation(shape: Shape) -> str:
    reasons = (activation.why_not_computed(layer.mlp.act) for layer in shape.config.layers)
    return next(filter(None, reasons), "")


def _dtype(spec: Spec, shape: Shape) -> str:
    quantized, on_cpu = bool(shape.method or spec.engine.quantization), spec.hardware.accelerator == CPU
    stored = shape.config.dtype or "bfloat16"
    found = compute_dtype.compute_dtype(spec.engine.dtype, stored, quantized=quantized, on_cpu=on_cpu)
    return compute_dtype.why_not_computed(found)
