"""How a model's weights will be stored, known from its config.json before there are files.

The engine asks the files (`models.loading.stored_weights`); what it finds there is what config.json says, and so are
these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.module_names import module_name
from stoker_engine.architectures.quantization.on_load import ON_LOAD, is_quantized
from stoker_engine.architectures.quantization.quantization_config import QuantizationConfig
from stoker_engine.architectures.quantization.stated import stated_quantization
from stoker_engine.architectures.stored_formats import FileFormat, StoredFormat
from stoker_engine.sizing.named_experts import NamedExperts, first_expert
from stoker_engine.sizing.weight_formats import WeightFormats
from stoker_engine.sizing.weight_sizes import matrices

#: Latent attention computes with these transposed, so they are dequantized when they are loaded.
_NUMBERS: Final = (".k_b", ".v_b")

#: Architectures whose files hold matrices transposed, which blocks do not bear; and the methods by which they do not.
_TRANSPOSED: Final[dict[str, tuple[str, ...]]] = {"GPT2LMHeadModel": (), "GptOssForCausalLM": ("mxfp4",)}


def stated_formats(
    config: ModelConfig, quantization: QuantizationConfig, given: Mapping[str, Any] | None = None
) -> WeightFormats:
    """Of a checkpoint that is quantized.

    Args:
        given: its parsed config.json, by which one expert stands for others; without, the name of each is matched.

    Raises:
        ModelError: a matrix is stored in a way that is not computed.
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
    """Of the same checkpoint as its files hold it, which is how large it is in other engines.

    Args:
        given: its parsed config.json.

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
    """What the names of the text model's modules begin with in place of ``model.``, and the others', as its
    ``quantization_config`` spells them: models that also read images have it within them."""
    stated = json.dumps(stated_quantization(given), default=str).replace("\\\\", "")
    if "model.language_model." in stated:
        return "model.language_model.", ""
    return ("language_model.model.", "language_model.") if "language_model.model." in stated else ("model.", "")


def refuse_transposed(architecture: str, method: str) -> None:
    """Refuses a checkpoint that `method` quantized, if it holds matrices transposed.

    Raises:
        ModelError: it does.
    """
    computed = _TRANSPOSED.get(architecture)
    if computed is not None and method not in computed:
        others = "".join(f"the one by {each}, or " for each in computed)
        raise ModelError(
            f"{architecture}'s checkpoints hold matrices transposed, and those by {method} are not computed; use "
            f"{others}the unquantized model with --quantization int8"
        )


def on_load_formats(config: ModelConfig, method: str) -> WeightFormats:
    """Of one that `method` of `ON_LOAD` quantizes when it is loaded."""
    modules = (module for module, _ in matrices(config, first_expert))
    return WeightFormats.of({module: ON_LOAD[method] for module in modules if is_quantized(f"{module}.weight")})
