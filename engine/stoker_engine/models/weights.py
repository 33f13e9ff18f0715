"""Strict loading: every slot of the model is filled exactly once, and every tensor of the files is accounted for.

A missing tensor is an error; so is one that nobody asked for, unless the family's description names it.
"""

from __future__ import annotations

import logging
import reprlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from tqdm import tqdm

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.errors import WeightsError
from stoker_engine.contract.json_file import read_json_object
from stoker_engine.models.weight_names import Place, WeightNames
from stoker_engine.quant.slot import Slot

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Tensors by name, one at a time, so that a model larger than memory to spare still loads."""

    def names(self) -> list[str]:
        """All tensor names in the files."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        ...

    def read_into(self, name: str, slot: Slot) -> None:
        """Fills `slot` with its part of one tensor, converted to its dtype.

        Raises:
            WeightsError: the whole tensor has another shape.
        """
        ...


class SafetensorsFolder:
    """The ``*.safetensors`` of a Hugging Face folder, through the index when there is one.

    Raises:
        WeightsError: no safetensors there, or a file that the index names is missing.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = Fields(read_json_object(index), {}, file=index.name).object("weight_map")
            files = sorted({str(name) for name in weight_map.values()})
            present = {path.name for path in folder.iterdir()}
            if strange := [name for name in files if Path(name).name != name]:
                raise WeightsError(f"{index} names {reprlib.repr(strange[0])}, which is no file of its folder")
            missing = [name[:200] for name in files if name not in present]
            if missing:
                raise WeightsError(f"{folder} lacks {_some(missing)}, named by {index.name}")
            paths = [folder / name for name in files]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise WeightsError(
                f"no *.safetensors in {folder}; convert other formats with transformers' save_pretrained"
            )
        try:
            self._files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        except Exception as error:
            raise WeightsError(f"cannot read the weights in {folder}: {error}") from error
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def names(self) -> list[str]:
        """See `WeightSource`."""
        return list(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """See `WeightSource`.

        Raises:
            WeightsError: the tensor does not hold floating-point numbers.
        """
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise not_floating(name, str(tensor.dtype).removeprefix("torch."))
        return tensor

    def not_floating(self) -> dict[str, str]:
        """The dtypes of tensors that do not hold floating-point numbers, by name."""
        dtypes = {name: str(file.get_slice(name).get_dtype()) for name, file in self._file_of.items()}
        return {name: dtype for name, dtype in dtypes.items() if dtype[0] in "IUB" and dtype != "BF16"}

    def read_into(self, name: str, slot: Slot) -> None:
        """See `WeightSource`."""
        fill(name, self.read(name), slot)


class Loadable(Protocol):
    """A model whose tensors can be filled."""

    config: ModelConfig

    def slots(self) -> dict[str, Slot]:
        """Every place that a checkpoint must fill, by slot name."""
        ...


def load_weights(model: Loadable, source: WeightSource, spelling: WeightNames) -> None:
    """Fills `model` from `source`, showing progress.

    Raises:
        WeightsError: tensors are missing, unused, doubled or of another shape; the message names them.
    """
    slots, config = model.slots(), model.config
    plan, filled = dict[str, Place](), dict[str, str]()
    ignored, unused = list[str](), list[str]()
    for name in source.names():
        canonical = spelling.canonical(name)
        place = spelling.place(canonical, slots, config)
        if place is not None:
            plan[name] = place
            for slot in place.slots:
                if slot in filled:
                    raise WeightsError(f"weights hold {slot} twice: as {filled[slot]} and as {name}")
                filled[slot] = name
        elif spelling.is_ignored(canonical, config) or _is_tied_head(canonical, spelling, config):
            ignored.append(name)
        else:
            unused.append(name)
    missing = sorted(set(slots) - set(filled))
    if missing:
        raise WeightsError(f"weights lack {len(missing)} tensors the model needs: {_some(missing)}")
    if unused:
        raise WeightsError(f"weights hold {len(unused)} tensors the model has no place for: {_some(unused)}")
    if ignored:
        logger.info("not needed and left out: %d tensors (%s)", len(ignored), _some(ignored))
    for name, place in tqdm(plan.items(), desc="Loading weights", unit="tensor", disable=None):
        targets = [slots[slot] for slot in place.slots]
        canonical = spelling.canonical(name)
        if place.split is None and not spelling.is_changed(canonical):
            source.read_into(name, targets[0])
        else:
            tensor = spelling.changed(canonical, source.read(name), config)
            try:
                parts = [tensor] if place.split is None else place.split(tensor, targets, config)
            except WeightsError as error:
                raise WeightsError(f"{name}: {error}") from None
            for target, part in zip(targets, parts, strict=True):
                fill(name, part, target)
        for target in targets:
            check_finite(name, target.tensor)


def check_finite(name: str, weights: torch.Tensor) -> None:
    """Weights are numbers: with others among them every answer would be nothing.

    Raises:
        WeightsError: nan or infinity is among them.
    """
    if weights.numel() and not all(
        bound.isfinite() for bound in torch.aminmax(weights)
    ):  # nan is both, where there is one
        dtype = str(weights.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name} holds nan or infinity as {dtype}: the file is damaged, or its numbers are too large for --dtype "
            f"{dtype}; fetch the file again, or try --dtype float32"
        )


def not_floating(name: str, dtype: str) -> WeightsError:
    """The refusal of a tensor of integers, which would be taken for the weights themselves."""
    return WeightsError(
        f"{name} holds {dtype}, not floating-point numbers, and config.json says nothing of a quantization; "
        "convert the model to bfloat16 (load it with what quantized it, dequantize, save_pretrained)"
    )


def fill(name: str, tensor: torch.Tensor, slot: Slot) -> None:
    """Copies a slot's part of `tensor`, which is whole and called `name` in the files.

    Raises:
        WeightsError: its shape is another.
    """
    if slot.full_shape != tensor.shape:
        raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, the model needs {tuple(slot.full_shape)}")
    slot.tensor.copy_(slot.part_of(tensor))


def _is_tied_head(name: str, spelling: WeightNames, config: ModelConfig) -> bool:
    """Whether this is a copy of the embedding."""
    return config.tie_word_embeddings and name == f"{spelling.names.get('lm_head')}.weight"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
