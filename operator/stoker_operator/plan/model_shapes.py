"""The sizes of a model, as far as they are known without loading it.

They follow from a config.json: fetched from the hub, read from a folder, or listed in the table of well-known models
(`models.yaml`). A model from another source, such as a claim, is not known before a pod mounts it; the engine checks it
when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from stoker_common.errors import ModelError
from stoker_common.model_source import ModelSource
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.no_decoder import NAME_ONE, NO_ARCHITECTURES, why_no_decoder
from stoker_engine.architectures.quantization.read import read_quantization
from stoker_engine.architectures.quantization.stated import quantization_method, without_quantization
from stoker_engine.architectures.stored_formats import GGUF_FORMATS, StoredFormat
from stoker_engine.architectures.text_config import text_of
from stoker_engine.sizing.planned_formats import file_formats, stated_formats
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats
from stoker_engine.sizing.weight_sizes import weight_sizes
from stoker_operator.api.violation import Violation
from stoker_operator.plan.foreign_models import foreign_config
from stoker_operator.plan.unplannable import Unplannable

#: Upper bounds of counts in a config.json. They bound the planner's time: it sums over all layers for each of hundreds
#: of layouts.
_MAX_SIZES: Final = {"num_hidden_layers": 1_000, "num_attention_heads": 10_000, "num_key_value_heads": 10_000}
TABLE: Final = Path(__file__).with_name("models.yaml")


@dataclass(frozen=True)
class Shape:
    """A model whose size is known.

    Attributes:
        config: the model's config.
        method: quantization method that the checkpoint states; empty if it states none.
        formats: formats in which the engine stores its weights; for a GGUF file, those on devices on which Stoker's
            engine has kernels for the file's blocks.
        is_gguf: whether the model is a GGUF file.
    """

    config: ModelConfig
    method: str = ""
    formats: WeightFormats = ALL_NUMBERS
    is_gguf: bool = False

    @property
    def experts(self) -> int:
        """Maximum number of routed experts of a layer; 0 if the model is not MoE."""
        return max((layer.moe.num_experts for layer in self.config.layers if layer.moe), default=0)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.config.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Number of heads by which the KV cache is split; 0 for latent attention, whose cache is replicated on every
        device."""
        return 0 if self.config.layers[0].attention.cache.latent else self.config.num_key_value_heads


def shape_of(source: ModelSource, config: Mapping[str, Any] | None, runtime: str = "stoker") -> Shape | str:
    """Return the shape of a source's model, or why it is not known.

    Args:
        config: the model's config.json; None if not known.
        runtime: runtime of the pods. vLLM supports more architectures than Stoker's engine.

    Raises:
        Unplannable: the runtime cannot run such a model.
    """
    if config is None:
        known = _known(f"demo://{source.name}" if source.scheme == "demo" else source.name, runtime)
        return known or _WHY[source.scheme]
    try:
        return _read(config, runtime)
    except ModelError as error:
        return str(error)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Files of a hub are untrusted input.
        return f"the model's config.json is not valid: {type(error).__name__}: {error}"


class Shapes:
    """Cache of the shapes that one plan and its trials need.

    The shape of a quantized MoE model takes longer than the rest of a plan, because all experts' names are matched.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[ModelSource, int, str], tuple[Mapping[str, Any] | None, Shape | str]] = {}

    def of(self, source: ModelSource, config: Mapping[str, Any] | None, runtime: str) -> Shape | str:
        """See `shape_of`."""
        key = (source, id(config), runtime)
        if key not in self._found:
            self._found[key] = (config, shape_of(source, config, runtime))  # keeps `config` alive: its id stays unique
        return self._found[key][1]


@lru_cache(maxsize=256)
def _known(name: str, runtime: str) -> Shape | str | None:
    """Return the shape of a model of the table, or why it is not known, or None if it is not in the table."""
    config = table().get(name)
    try:
        shape = None if config is None else _read(config, runtime)
        gguf = _formats().get(name)
        return shape if gguf is None or not isinstance(shape, Shape) else replace(shape, formats=gguf, is_gguf=True)
    except ModelError as error:
        return str(error)


def _read(config: Mapping[str, Any], runtime: str) -> Shape | str:
    """Return the shape that a config.json describes, or why it is not known.

    An exception that is not listed below means that the file is not valid.

    Raises:
        Unplannable: the runtime cannot run such a model.
        ModelError: the model is not supported.
    """
    reason = why_no_decoder(config)
    if reason:
        names = ", ".join(config.get("architectures") or []) or "this model"
        raise Unplannable(
            Violation(
                "spec.model.source",
                f"{names} is not served: {reason}",
                "name a model that generates text, such as one of architecture LlamaForCausalLM",
                reason="NoDecoder",
            )
        )
    if not config.get("architectures"):
        if runtime != "stoker":
            return f"the model's {NO_ARCHITECTURES}"
        problem = f"the model's {NO_ARCHITECTURES}"
        raise Unplannable(Violation("spec.model.source", problem, NAME_ONE, reason="NoDecoder"))
    plain = without_quantization(config)
    _bounded(Fields(text_of(plain), {}))
    is_stoker, method = runtime == "stoker", quantization_method(config)
    try:
        quantization = read_quantization(config)
    except ModelError as error:
        if is_stoker:
            raise
        return f"the size of weights quantized by {method} is not known: {error}"
    model = ModelConfig.from_dict(plain) if is_stoker else foreign_config(plain)
    _positive(model)
    if quantization is None:
        return Shape(model)
    stored = stated_formats(model, quantization, config) if is_stoker else file_formats(model, quantization, config)
    return Shape(model, quantization.method, stored)


def _bounded(fields: Fields) -> None:
    """Check counts against `_MAX_SIZES`, before that many objects are created.

    Raises:
        ValueError: a count is out of range; the message names the field.
    """
    for name, limit in _MAX_SIZES.items():
        value = fields.get(name)
        if value is not None and not 0 < int(value) <= limit:
            raise ValueError(f"{name} is {value!r}")


def _positive(config: ModelConfig) -> None:
    """Check that sizes are positive.

    Raises:
        ValueError: a size is below 1.
    """
    sizes = [config.hidden_size, config.vocab_size, config.longest_model_len, config.default_model_len]
    for layer in config.layers:
        cache = layer.attention.cache
        window = cache.sliding_window
        sizes += [cache.numbers_per_token, layer.mlp.size, 1 if window is None else window]
    weights = [(size.numbers, size.units) for size in weight_sizes(config)]
    if min(sizes) < 1 or any(numbers < 0 or units < 1 for numbers, units in weights):
        raise ValueError("a size is below 1")


@cache
def table() -> dict[str, Mapping[str, Any]]:
    """Return the config.json of each well-known model, by id."""
    return {name: entry["config"] for entry in _entries() for name in entry["ids"]}


@cache
def _formats() -> dict[str, WeightFormats]:
    """Return the weight formats of the well-known models that are GGUF files, by id."""
    known = [entry for entry in _entries() if "formats" in entry]
    return {name: _formats_of(entry) for entry in known for name in entry["ids"]}


def _formats_of(entry: Mapping[str, Any]) -> WeightFormats:
    """Return the weight formats of an entry: one type for each weight, or a list with one for each layer."""
    slots: dict[str, StoredFormat | None] = {}
    for weight, types in entry["formats"].items():
        if isinstance(types, str) and weight in ("embed", "lm_head"):
            slots[weight] = GGUF_FORMATS[types]
            continue
        layers = range(entry["config"]["num_hidden_layers"])
        each = [types] * len(layers) if isinstance(types, str) else types
        slots |= {f"layers.{layer}.{weight}": GGUF_FORMATS[name] for layer, name in zip(layers, each, strict=True)}
    return WeightFormats.of(slots)


@cache
def _entries() -> list[dict[str, Any]]:
    # libyaml's loader, if available, is ten times as fast.
    entries: list[dict[str, Any]] = yaml.load(
        TABLE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return entries


_WHY: Final = {
    "hf": "the model's config.json has not been fetched, and the model is not among the well-known ones",
    "pvc": "the model on a claim is not known before a pod mounts it",
    "file": "the model of this file:// source is not known before the engine reads it",
    "demo": "this demo model is not known",
}
