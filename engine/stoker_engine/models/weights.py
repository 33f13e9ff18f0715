"""Strict loading: every slot of the model is filled exactly once, and every tensor of the files is accounted for.

A missing tensor is an error; so is one that nobody asked for, unless the family's description names it.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from tqdm import tqdm

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.errors import WeightsError
from stoker_engine.contract.json_file import read_json_object
from stoker_engine.models.row_slices import read_rows
from stoker_engine.models.weight_names import Make, Place, Split, Transposed, WeightNames, moves_rows
from stoker_engine.models.weight_source import Part, WeightSource, check_shape
from stoker_engine.quant.slot import Slot
from stoker_engine.sizing.block_weights import BlockFormat

logger = logging.getLogger(__name__)


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

    def shape(self, name: str) -> torch.Size:
        """See `WeightSource`."""
        return torch.Size(self._file_of[name].get_slice(name).get_shape())

    def blocks(self, name: str) -> BlockFormat | None:
        """See `WeightSource`."""
        return None

    def read(self, name: str, part: Part | None = None, blocks: BlockFormat | None = None) -> torch.Tensor:
        """See `WeightSource`; all of a tensor is a view of the file, a part of it a copy.

        Raises:
            WeightsError: the tensor does not hold floating-point numbers.
        """
        assert blocks is None, "safetensors hold numbers"
        file = self._file_of[name]
        tensor: torch.Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
        if not tensor.is_floating_point():
            raise not_floating(name, str(tensor.dtype).removeprefix("torch."))
        return tensor

    def not_floating(self) -> dict[str, str]:
        """The dtypes of tensors that do not hold floating-point numbers, by name."""
        dtypes = {name: str(file.get_slice(name).get_dtype()) for name, file in self._file_of.items()}
        return {name: dtype for name, dtype in dtypes.items() if dtype[0] in "IUB" and dtype != "BF16"}

    def read_into(self, name: str, slot: Slot) -> None:
        """See `WeightSource`."""
        check_shape(name, self.shape(name), slot)
        slot.tensor.copy_(self.read(name, slot.shard))


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
        _fill(source, name, spelling.makes(spelling.canonical(name)), place.split, targets, config)
        for target in targets:
            check_finite(name, _bounds_of(target))


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


def _bounds_of(slot: Slot) -> torch.Tensor:
    """Numbers that are finite if all of the slot's are: of blocks, their scales."""
    if slot.blocks is None:
        return slot.tensor
    blocks = slot.tensor.reshape(-1, slot.blocks.bytes)
    return blocks[:, :2].contiguous().view(torch.float16)


def not_floating(name: str, dtype: str) -> WeightsError:
    """The refusal of a tensor of integers, which would be taken for the weights themselves."""
    return WeightsError(
        f"{name} holds {dtype}, not floating-point numbers, and config.json says nothing of a quantization; "
        "convert the model to bfloat16 (load it with what quantized it, dequantize, save_pretrained)"
    )


def _fill(
    source: WeightSource, name: str, makes: list[Make], split: Split | None, slots: list[Slot], config: ModelConfig
) -> None:
    """Fills `slots` with the tensor called `name` in the files, once `makes` and then `split` have been applied to it.

    Raises:
        WeightsError: its shape does not fit.
    """

    def parts_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        try:
            for make in makes:
                tensor = make(tensor, config)
            return [tensor] if split is None else split(tensor, slots, config)
        except WeightsError as error:
            raise WeightsError(f"{name}: {error}") from None
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise WeightsError(f"{name} has shape {tuple(source.shape(name))}, which cannot be: {error}") from error

    if split is None and all(isinstance(make, Transposed) for make in makes):
        (slot,) = slots
        for make in reversed(makes):
            assert isinstance(make, Transposed)
            slot = slot.transpose(make.first, make.second)
        source.read_into(name, slot)
    elif any(slot.shard or slot.blocks for slot in slots) and moves_rows(makes, split):
        read_rows(source, name, parts_of, slots)
    else:
        parts = parts_of(source.read(name))
        if len(parts) != len(slots):
            raise WeightsError(f"{name} holds {len(parts)} weights, the model needs {len(slots)}")
        for slot, part in zip(slots, parts, strict=True):
            check_shape(name, part.shape, slot)
            slot.tensor.copy_(slot.part_of(part))


def _is_tied_head(name: str, spelling: WeightNames, config: ModelConfig) -> bool:
    """Whether this is a copy of the embedding."""
    return config.tie_word_embeddings and name == f"{spelling.names.get('lm_head')}.weight"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
