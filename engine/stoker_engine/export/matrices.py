"""Which tensors of a checkpoint hold matrices to quantize, and under which names their parts are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.on_load import is_quantized
from stoker_engine.contract.errors import ModelError
from stoker_engine.models.weight_names import WeightNames


@dataclass(frozen=True)
class Module:
    """A linear module that is written.

    Attributes:
        name: in the new checkpoint.
        outputs, inner: of its matrix.
        part: where that lies in the tensor of the file.
    """

    name: str
    outputs: int
    inner: int
    part: tuple[slice, ...]


def modules_of(name: str, shape: tuple[int, ...], spelling: WeightNames, config: ModelConfig) -> list[Module]:
    """The modules to quantize that the tensor called `name` holds; none: it stays as it is.

    A layer's experts that are stacked in one tensor become a module each, as compressed-tensors has them.

    Raises:
        ModelError: it holds matrices, in a form that compressed-tensors has no module for.
    """
    canonical = spelling.canonical(name)
    place = None if spelling.is_ignored(canonical, config) else spelling.place(canonical, _EVERY_SLOT, config)
    if place is None or not all(map(is_quantized, place.slots)):
        return []
    if not spelling.makes(canonical):
        if name.endswith(".weight") and len(shape) == 2:
            whole = slice(0, shape[0]), slice(0, shape[1])
            return [Module(name.removesuffix(".weight"), shape[0], shape[1], whole)]
        stem, _, _ = name.removesuffix(".weight").rpartition(".")
        names = [spelling.names.get(_numberless(slot)) for slot in place.slots]
        if stem.endswith(".experts") and len(shape) == 3 and shape[0] and len(names) % shape[0] == 0 and all(names):
            return list(
                _experts(stem, shape, [str(each).rpartition(".")[2] for each in names[: len(names) // shape[0]]])
            )
    raise ModelError(
        f"compressed-tensors stores linear modules, and {name}, of shape {list(shape)}, is none "
        f"({config.architecture}); quantize when the model is loaded: stoker serve --quantization"
    )


def _experts(stem: str, shape: tuple[int, ...], parts: list[str]) -> Iterator[Module]:
    count, rows, inner = shape
    size = rows // len(parts)
    for expert in range(count):
        for index, part in enumerate(parts):
            place = slice(expert, expert + 1), slice(index * size, (index + 1) * size), slice(0, inner)
            yield Module(f"{stem}.{expert}.{part}", size, inner, place)


def _numberless(slot: str) -> str:
    """``layers.3.experts.7.gate.weight`` → ``layers.{i}.experts.{j}.gate``."""
    head, _, rest = slot.removesuffix(".weight").removeprefix("layers.").partition(".")
    assert head.isdigit()
    expert = rest.split(".")
    if len(expert) == 3:
        rest = f"{expert[0]}.{{j}}.{expert[2]}"
    return f"layers.{{i}}.{rest}"


class _EverySlot:
    """All names: matrices have one possible place each, and the model is not made."""

    def __contains__(self, name: object) -> bool:
        return True


_EVERY_SLOT = _EverySlot()
