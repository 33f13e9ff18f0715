"""Strict loading: every slot of the model is filled exactly once, and every tensor of the files is accounted for.

A missing tensor is an error; so is one that nobody asked for, unless the family's description names it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from tqdm import tqdm

from stoker_engine.contract.errors import WeightsError
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.family import WeightNames

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Tensors by name, one at a time, so that a model larger than memory to spare still loads."""

    def names(self) -> list[str]:
        """All tensor names in the files."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        ...


class SafetensorsFolder:
    """The ``*.safetensors`` of a Hugging Face folder, through the index when there is one.

    Raises:
        WeightsError: no safetensors there, or a file that the index names is missing.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            missing = [name for name in files if not (folder / name).is_file()]
            if missing:
                raise WeightsError(f"{folder} lacks {', '.join(missing)}, named by {index.name}")
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
        """See `WeightSource`."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor


def load_weights(model: Decoder, source: WeightSource, spelling: WeightNames) -> None:
    """Fills `model` from `source`, showing progress.

    Raises:
        WeightsError: tensors are missing, unused or of another shape; the message names them.
    """
    slots = model.slots()
    slot_of = spelling.slot_of(model.config.num_hidden_layers)
    plan, ignored, unused = dict[str, str](), list[str](), list[str]()
    for name in source.names():
        slot = _slot(spelling.canonical(name), slot_of)
        if slot == "lm_head.weight" and model.config.tie_word_embeddings:
            ignored.append(name)  # a copy of the embedding
        elif slot in slots:
            plan[name] = slot
        elif spelling.is_ignored(name):
            ignored.append(name)
        else:
            unused.append(name)
    missing = sorted(set(slots) - set(plan.values()))
    if missing:
        raise WeightsError(f"weights lack {len(missing)} tensors the model needs: {_some(missing)}")
    if unused:
        raise WeightsError(f"weights hold {len(unused)} tensors the model has no place for: {_some(unused)}")
    if ignored:
        logger.info("not needed and left out: %d tensors (%s)", len(ignored), _some(ignored))
    for name in tqdm(plan, desc="Loading weights", unit="tensor", disable=None):
        _fill(slots[plan[name]], source.read(name), name, plan[name], spelling)


def _slot(name: str, slot_of: dict[str, str]) -> str | None:
    stem, _, suffix = name.rpartition(".")
    return f"{slot_of[stem]}.{suffix}" if stem in slot_of and suffix in ("weight", "bias") else None


def _fill(slot: torch.Tensor, tensor: torch.Tensor, name: str, slot_name: str, spelling: WeightNames) -> None:
    if slot.shape != tensor.shape:
        raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, the model needs {tuple(slot.shape)}")
    if spelling.norm_offset and slot_name.endswith("norm.weight"):
        tensor = tensor.float() + spelling.norm_offset
    slot.copy_(tensor)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
