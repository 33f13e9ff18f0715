"""Storage formats of a model's weights, derived from its config.json before the files are downloaded.

The engine reads the formats from the files (`models.loading.stored_weights`). Both agree, since the files follow their
config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.module_names import module_name
from stoker_engine.architectures.quantization.on_load import formats_on_load, matrix_of
from stoker_engine.architectures.quantization.quantization_config import QuantizationConfig
from stoker_engine.architectures.quantization.stated import stated_quantization
from stoker_engine.architectures.stored_formats import FileFormat, StoredFormat
from stoker_engine.sizing.named_experts import NamedExperts, first_expert
from stoker_engine.sizing.weight_formats import WeightFormats
from stoker_engine.sizing.weight_sizes import matrices

#: Latent attention's matrices, which one tensor of the checkpoint contains. ``k_b`` is used transposed, so both are
#: dequantized when they are loaded.
_NUMBERS: Final = (".k_b", ".v_b")

#: Architecture whose files hold transposed matrices, which blocks along rows do not allow → methods that are supported
#: nevertheless.
_TRANSPOSED: Final[dict[str, tuple[str, ...]]] = {"GPT2LMHeadModel": (), "GptOssForCausalLM": ("mxfp4",)}


def stated_formats(
    config: ModelConfig, quantization: QuantizationConfig, given: Mapping[str, Any] | None = None
) -> WeightFormats:
    """Return the formats of a quantized checkpoint.

    Args:
        given: parsed config.json, from which the experts that need to be checked are chosen; if None, the name of
            every expert is matched.

    Raises:
        ModelError: a matrix is stored in an unsupported format.
    """
    refuse_transposed(config.architecture, quantization.method)
    sized = matrices(config) if given is None else matrices(config, NamedExperts.of(stated_quantization(given)))
    return WeightFormats.of(
        {
            module: quantization.format_of(module_name(config.architecture, module), matrix.rows, matrix.inner)
            for module, matrix in sized
            if not module.endswith(_NUMBERS)
        }
    )


def file_formats(config: ModelConfig, quantization: QuantizationConfig, given: Mapping[str, Any]) -> WeightFormats:
    """Return the formats of the matrices in a quantized checkpoint's files, which determine its size in other engines.

    Args:
        given: parsed config.json.

    Raises:
        ModelError: see `stated_formats`.
    """
    layers, ends = _wrapper(given)
    formats: dict[str, StoredFormat | None] = {}
    for module, matrix in matrices(config, first_expert):
        name = module_name(config.architecture, module)
        name = layers + name.removeprefix("model.") if name.startswith("model.") else ends + name
        stored = quantization.format_of(name, matrix.rows, matrix.inner)
        formats[module] = None if stored is None else FileFormat.of(stored, quantization.rows_of(name))
    return WeightFormats.of(formats)


def _wrapper(given: Mapping[str, Any]) -> tuple[str, str]:
    """Return the prefixes that ``quantization_config`` uses for the layers, instead of ``model.``, and for the modules
    outside of them. Multimodal checkpoints nest the text model."""
    stated = json.dumps(stated_quantization(given), default=str).replace("\\\\", "")
    if "model.language_model." in stated:
        return "model.language_model.", ""
    return ("language_model.model.", "language_model.") if "language_model.model." in stated else ("model.", "")


def refuse_transposed(architecture: str, method: str) -> None:
    """Reject a checkpoint quantized by `method` if its architecture stores matrices transposed.

    Raises:
        ModelError: the architecture stores matrices transposed, and `method` is not supported for it.
    """
    computed = _TRANSPOSED.get(architecture)
    if computed is not None and method not in computed:
        others = "".join(f"a checkpoint quantized by {each}, or " for each in computed)
        raise ModelError(
            f"{architecture}'s checkpoints hold matrices transposed, and {method} is not supported for them; use "
            f"{others}the unquantized model with --quantization int8"
        )


def on_load_formats(config: ModelConfig, method: str, on_cpu: bool) -> WeightFormats:
    """Return the formats of a model that `method` of `ON_LOAD` quantizes when it is loaded, on a CPU or an
    accelerator."""
    formats = formats_on_load(method, on_cpu)
    modules = (module for module, _ in matrices(config, first_expert))
    return WeightFormats.of({module: formats[part] for module in modules if (part := matrix_of(f"{module}.weight"))})
