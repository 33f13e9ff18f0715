"""Grouping of tensors by module and part."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from stoker_common.errors import WeightsError
from stoker_engine.architectures.stored_formats import GroupFormat

logger = logging.getLogger(__name__)

#: Parts that describe quantized activations; they are ignored, since each token has its own scale, or none.
OF_ACTIVATIONS: Final = (
    "input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale", "output_scale",
    "output_zero_point",
)  # fmt: skip

#: Output scales of the modules whose outputs are cached are scales of the KV cache, not parts of the module.
_CACHED: Final = (".k_proj.output_scale", ".v_proj.output_scale")


def components(names: Iterable[str], parts: Iterable[str], joint: str = ".") -> dict[str, dict[str, str]]:
    """Return the tensors' names by module and part: ``{"lm_head": {"scale": "lm_head.scale"}}``.

    Args:
        names: names of tensors.
        parts: parts to look for; other tensors are left out.
        joint: separator between the names of a module and of its part.
    """
    part_names = frozenset(parts)
    found: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, part = name.rpartition(joint)
        if module and part in part_names and not name.endswith(_CACHED):
            found.setdefault(module, {})[part] = name
    return found


def refuse_others(module: str, parts: dict[str, str], known: Iterable[str]) -> None:
    """Check that a module has only the parts in `known` and `OF_ACTIVATIONS`.

    Raises:
        WeightsError: it has a part that the computation would ignore.
    """
    for part in sorted(parts.keys() - {*known, *OF_ACTIVATIONS}):
        raise WeightsError(
            f"{parts[part]} does not belong to the quantization of {module} in config.json; download the model again"
        )


def needed(module: str, parts: dict[str, str], part: str) -> str:
    """Return the name of a part's tensor.

    Raises:
        WeightsError: the module does not have that part.
    """
    if part not in parts:
        raise WeightsError(f"{module} is quantized but has no {part}; download the model again")
    return parts[part]


def log_activations(stated: str, formats: Iterable[GroupFormat]) -> None:
    """Log which parts of a checkpoint's quantization of activations are not applied.

    Args:
        stated: description of that quantization; empty if there is none.
        formats: formats of the checkpoint's matrices.
    """
    if not stated:
        return
    if not any(format.quantized_activations for format in formats):
        logger.info("activations are not quantized, although config.json states %s", stated)
    elif "stored scales" in stated:
        logger.info("the checkpoint's scales of activations are not used; each token has its own")
