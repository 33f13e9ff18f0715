"""Determines which tensors of a checkpoint are quantized, and the names of the modules that are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.on_load import is_quantized
from stoker_engine.architectures.weight_names import EVERY_NAME, WeightNames


@dataclass(frozen=True)
class Module:
    """A linear module of the new checkpoint.

    Attributes:
        name: name in the new checkpoint.
        outputs, inner: size of its matrix.
        part: slices of the matrix in the file's tensor.
        param_names: the model's weights (see `models.decoder`) that are stacked along its rows.
    """

    name: str
    outputs: int
    inner: int
    part: tuple[slice, ...]
    param_names: tuple[str, ...]


def modules_of(name: str, shape: tuple[int, ...], weight_names: WeightNames, config: ModelConfig) -> list[Module]:
    """Return the modules to quantize in the tensor called `name`; if there are none, it is copied.

    Experts that are stacked in one tensor become separate modules, as compressed-tensors requires.

    Raises:
        ModelError: the tensor contains matrices in a layout that compressed-tensors cannot store.
        WeightsError: the number of experts differs from the model's.
    """
    canonical = weight_names.canonical(name)
    ignored = weight_names.is_ignored(canonical, config)
    destination = None if ignored else weight_names.destination(canonical, EVERY_NAME, config)
    if destination is None or not all(map(is_quantized, destination.param_names)):
        return []
    if not destination.operations:
        if name.endswith(".weight") and len(shape) == 2:
            whole = slice(0, shape[0]), slice(0, shape[1])
            return [Module(name.removesuffix(".weight"), shape[0], shape[1], whole, destination.param_names)]
        stem, _, _ = name.removesuffix(".weight").rpartition(".")
        parts = [weight_names.names.get(part) for part in dict.fromkeys(map(_numberless, destination.param_names))]
        if stem.endswith(".experts") and len(shape) == 3 and all(parts):
            return list(
                _experts(name, stem, shape, [str(part).rpartition(".")[2] for part in parts], destination.param_names)
            )
    raise ModelError(
        f"compressed-tensors stores only linear modules, and {name}, of shape {list(shape)}, is not a linear module "
        f"({config.architecture}); quantize while the model is loaded: stoker serve --quantization"
    )


def _experts(
    name: str, stem: str, shape: tuple[int, ...], parts: list[str], param_names: tuple[str, ...]
) -> Iterator[Module]:
    count, rows, inner = shape
    if count * len(parts) != len(param_names) or rows % len(parts):
        raise WeightsError(
            f"{name} has shape {list(shape)}, but the model has {len(param_names) // len(parts)} experts "
            f"with {len(parts)} matrices each"
        )
    size = rows // len(parts)
    for expert in range(count):
        for index, part in enumerate(parts):
            part_of_stack = slice(expert, expert + 1), slice(index * size, (index + 1) * size), slice(0, inner)
            yield Module(
                f"{stem}.{expert}.{part}", size, inner, part_of_stack, (param_names[expert * len(parts) + index],)
            )


def _numberless(param_name: str) -> str:
    """Replace layer and expert numbers: ``layers.3.experts.7.gate.weight`` → ``layers.{i}.experts.{j}.gate``."""
    head, _, rest = param_name.removesuffix(".weight").removeprefix("layers.").partition(".")
    assert head.isdigit()
    expert = rest.split(".")
    if len(expert) == 3:
        rest = f"{expert[0]}.{{j}}.{expert[2]}"
    return f"layers.{{i}}.{rest}"
