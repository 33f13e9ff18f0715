"""The tensors of each module, by what follows its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stoker_common.errors import WeightsError

#: What files hold of activations, which are not quantized: known, and not needed.
OF_ACTIVATIONS: Final = (
    "input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale", "output_scale",
    "output_zero_point",
)  # fmt: skip

#: Of the modules whose outputs are cached, that is their scale in the KV cache.
_CACHED: Final = (".k_proj.output_scale", ".v_proj.output_scale")


def components(names: Iterable[str], parts: Iterable[str], joint: str = ".") -> dict[str, dict[str, str]]:
    """Which of `parts` each module has, and the names of the tensors: ``{"lm_head": {"scale": "lm_head.scale"}}``.

    Args:
        joint: what stands between the name of a module and that of its part.
    """
    part_names = frozenset(parts)
    found: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, part = name.rpartition(joint)
        if module and part in part_names and not name.endswith(_CACHED):
            found.setdefault(module, {})[part] = name
    return found


def refuse_others(module: str, parts: dict[str, str], known: Iterable[str]) -> None:
    """That the module has no part but those that are `known`, and those of activations.

    Raises:
        WeightsError: it has one that would not be computed with.
    """
    for part in sorted(parts.keys() - {*known, *OF_ACTIVATIONS}):
        raise WeightsError(
            f"{parts[part]} does not belong to the quantization of {module} in config.json; download the model again"
        )


def needed(module: str, parts: dict[str, str], part: str) -> str:
    """The name of that part of the module.

    Raises:
        WeightsError: it is not there.
    """
    if part not in parts:
        raise WeightsError(f"{module} is quantized but has no {part}; download the model again")
    return parts[part]
