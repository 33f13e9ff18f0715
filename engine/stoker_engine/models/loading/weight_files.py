"""The safetensors files of a Hugging Face folder. Does not import torch: the server checks them before it starts an
engine."""

from __future__ import annotations

import reprlib
from pathlib import Path

from stoker_common.errors import WeightsError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.contract.json_file import read_json_object


def weight_files(folder: Path) -> list[Path]:
    """Return the files that the index names or, without an index, all safetensors files.

    Raises:
        ModelError: the index is invalid.
        WeightsError: the folder has no safetensors, or lacks a file that the index names.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = Fields(read_json_object(index), {}, file=index.name).object("weight_map")
        files = sorted({str(name) for name in weight_map.values()})
        present = {path.name for path in folder.iterdir()}
        if strange := [name for name in files if Path(name).name != name]:
            raise WeightsError(f"{index} names {reprlib.repr(strange[0])}, which is not a file in the same folder")
        missing = [name[:200] for name in files if name not in present]
        if missing:
            raise WeightsError(f"{folder} lacks {some(missing)}, named by {index.name}")
        paths = [folder / name for name in files]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsError(
            f"no *.safetensors in {folder}; repeat an incomplete download, and convert other formats with "
            "transformers' save_pretrained"
        )
    return paths


def refuse_other_formats(folder: Path) -> None:
    """Refuse a folder whose weights are only in formats that are unsafe to load.

    Raises:
        WeightsError: the folder has no safetensors, but weights in other formats.
    """
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if not any(folder.glob("*.safetensors")) and others:
        raise WeightsError(
            f"{folder} has no *.safetensors, and {', '.join(others[:3])} can run code when loaded; to convert them, "
            "load the model with transformers and save it with save_pretrained"
        )


def some(names: list[str]) -> str:
    """Return the first five names and the number of others, for messages."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
