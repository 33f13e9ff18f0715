"""Check, before anything is written, that the files contain the matrices of the model that config.json describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker_common.errors import WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.on_load import is_quantized
from stoker_engine.architectures.weight_names import EVERY_NAME, WeightNames
from stoker_engine.export.matrices import Module
from stoker_engine.models.loading.kv_scales import is_kv_scale
from stoker_engine.models.loading.weight_files import some
from stoker_engine.sizing.weight_sizes import matrices


def check_complete(tensors: Mapping[str, Sequence[Module]], weight_names: WeightNames, config: ModelConfig) -> None:
    """Check that the model's matrices and the files' tensors match.

    Args:
        tensors: modules to quantize of each tensor in the files, by the tensor's name.

    Raises:
        WeightsError: matrices are missing, duplicated or of the wrong shape, or the model does not use a tensor, such
            as the scales of weights that are already quantized; the message names some.
    """
    needed, held = _needed(config), dict[str, str]()
    for name, modules in tensors.items():
        for module in modules:
            for param_name in module.param_names:
                if param_name in held:
                    raise WeightsError(f"the weights contain {param_name} twice: as {held[param_name]} and as {name}")
                held[param_name] = name
            if all(param_name in needed for param_name in module.param_names):
                rows, inner = (
                    sum(needed[param_name][0] for param_name in module.param_names),
                    needed[module.param_names[0]][1],
                )
                if (module.outputs, module.inner) != (rows, inner):
                    raise WeightsError(
                        f"{name} holds {module.outputs} rows of {module.inner} elements as {module.name}, "
                        f"but the model needs {rows} of {inner}"
                    )
    if missing := sorted(needed.keys() - held.keys()):
        raise WeightsError(f"the weights lack {len(missing)} matrices that the model needs: {some(missing)}")
    unused = [held[param_name] for param_name in sorted(held.keys() - needed.keys())]
    unused += [name for name, modules in tensors.items() if not modules and not _is_known(name, weight_names, config)]
    if unused:
        raise WeightsError(f"the weights contain {len(unused)} tensors that the model does not use: {some(unused)}")


def _needed(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of the matrices to quantize, by parameter name."""
    needed = dict[str, tuple[int, int]]()
    for name, size in matrices(config):
        if is_quantized(f"{name}.weight"):
            for expert in range(size.count if ".experts.0." in name else 1):
                param_name = name.replace(".experts.0.", f".experts.{expert}.")
                needed[f"{param_name}.weight"] = (size.rows, size.inner)
    return needed


def _is_known(name: str, weight_names: WeightNames, config: ModelConfig) -> bool:
    canonical = weight_names.canonical(name)
    destination = weight_names.destination(canonical, EVERY_NAME, config)
    return destination is not None or weight_names.is_ignored(canonical, config) or is_kv_scale(name)
