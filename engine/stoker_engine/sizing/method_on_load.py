"""The method by which ``--quantization`` quantizes a checkpoint while it is loaded."""

from __future__ import annotations

from stoker_common.errors import ArgumentError
from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.sizing.quantized_weights import canonical_method


def method_on_load(requested: str | None, stated: str | None) -> str | None:
    """Return the method of `ON_LOAD` by which matrices are quantized while loading, or None if they keep the
    checkpoint's format.

    Args:
        requested: value of ``--quantization``.
        stated: quantization method of the checkpoint; None if it is not quantized.

    Raises:
        ArgumentError: the checkpoint is quantized by another method, or `requested` is not possible while loading.
    """
    if requested is None or (stated is not None and canonical_method(requested) == canonical_method(stated)):
        return None
    if stated is not None:
        raise ArgumentError(
            "--quantization",
            f"{requested} is requested, but the checkpoint is already quantized by {stated}; leave it out",
        )
    if requested not in ON_LOAD:
        raise ArgumentError(
            "--quantization",
            f"{requested} is requested, but the checkpoint is not quantized; methods that quantize while loading are "
            f"{', '.join(ON_LOAD)}",
        )
    return requested
