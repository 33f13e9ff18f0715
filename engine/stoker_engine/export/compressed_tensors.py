"""Quantizes a Hugging Face folder into compressed-tensors' format, which transformers, vLLM and Stoker read.

Files keep their names. A tensor to quantize is replaced, in the same file, by the quantized tensors of each of its
modules; other tensors are copied. Matrices are read and quantized one by one: the model need not fit into memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from stoker_common.errors import ArgumentError, ModelError, WeightsError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.architectures.quantization.stated import quantization_method
from stoker_engine.architectures.weight_names import WeightNames
from stoker_engine.export.completeness import check_complete
from stoker_engine.export.matrices import Module, modules_of
from stoker_engine.export.output import new_output
from stoker_engine.export.round_to_nearest import quantized
from stoker_engine.export.safetensors_file import SafetensorsWriter
from stoker_engine.export.schemes import Scheme
from stoker_engine.models.loading.safetensors_folder import RawTensors, not_floating

_INDEX: Final = "model.safetensors.index.json"
#: Suffixes of files that hold weights; they are not copied.
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file, and its modules to quantize; a tensor without any is copied."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    modules: list[Module]

    def specs(self, scheme: Scheme) -> dict[str, torch.Tensor]:
        """Return the tensors that are written for this one, on the meta device."""
        if not self.modules:
            return {self.name: torch.empty(self.shape, dtype=self.dtype, device="meta")}
        specs = dict[str, torch.Tensor]()
        for module in self.modules:
            specs |= _named(module, _stored_as(module.outputs, module.inner, self.dtype, scheme))
        return specs


@cache
def _stored_as(outputs: int, inner: int, dtype: torch.dtype, scheme: Scheme) -> dict[str, torch.Tensor]:
    """Return a quantized matrix's tensors, on the meta device. They are cached: a model's matrices have few shapes."""
    return quantized(torch.empty(outputs, inner, dtype=dtype, device="meta"), scheme)


def export(folder: Path, scheme: Scheme, label: str, target: Path) -> None:
    """Write the model in `folder` to the new folder `target`, with its matrices quantized by `scheme`.

    Args:
        label: name of the scheme, for messages.

    Raises:
        ModelError: the model cannot be quantized by this scheme.
        WeightsError: the weights do not match the model, are not supported, or contain NaN or infinity.
        ArgumentError: `target` exists and is not empty, the disk is too full, or the group size does not divide a row.
        StokerError: writing failed.
    """
    raw_config = read_config(folder)
    weight_names, config = _family(folder, raw_config, label)
    source = RawTensors(folder)
    files = {
        file: [_tensor(source, name, weight_names, config) for name in names]
        for file, names in source.by_file().items()
    }
    every = [tensor for tensors in files.values() for tensor in tensors]
    check_complete({tensor.name: tensor.modules for tensor in every}, weight_names, config)
    _check_groups(every, scheme)
    specs = {file: _specs(tensors, scheme) for file, tensors in files.items()}
    others = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json")
    ]
    size = sum(spec.nbytes for each in specs.values() for spec in each.values())
    with new_output(target, size + sum(path.stat().st_size for path in others)) as partial:
        partial.mkdir()
        for path in others:
            if path.name != "config.json":
                shutil.copyfile(path, partial / path.name)
        stated = scheme.config(_ignored(every, weight_names, config))
        _write_json(partial / "config.json", {**raw_config, "quantization_config": stated})
        if (folder / _INDEX).is_file():
            names = {name: file for file, each in specs.items() for name in each}
            _write_json(partial / _INDEX, {"metadata": {"total_size": size}, "weight_map": names})
        with tqdm(total=len(every), desc="Quantizing weights", unit="tensor", disable=None) as progress:
            for file, tensors in files.items():
                with SafetensorsWriter(partial / file, specs[file]) as writer:
                    for tensor in tensors:
                        _write(source, tensor, scheme, writer)
                        progress.update()


def _family(folder: Path, raw_config: Mapping[str, Any], label: str) -> tuple[WeightNames, ModelConfig]:
    if method := quantization_method(raw_config):
        raise ModelError(
            f"{folder} is already quantized by {method}, but {label} is requested; pass the unquantized model"
        )
    architectures = Fields(raw_config, {}).items("architectures", str)
    if not any(name in FAMILIES for name in architectures):
        raise ModelError(
            f"{folder}: stoker quantize does not support {', '.join(architectures) or 'an unnamed architecture'}; "
            "quantize the model with llm-compressor"
        )
    config = ModelConfig.from_dict(raw_config)
    return FAMILIES[config.architecture].weight_names, config


def _tensor(source: RawTensors, name: str, weight_names: WeightNames, config: ModelConfig) -> _Tensor:
    shape, dtype = tuple(source.shape(name)), source.dtype(name)
    if dtype is None:
        raise WeightsError(f"{name} has a dtype that is not supported; remove the tensor from the checkpoint")
    modules = modules_of(name, shape, weight_names, config)
    if modules and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise not_floating(name, str(dtype).removeprefix("torch."))
    return _Tensor(name, shape, dtype, modules)


def _check_groups(tensors: list[_Tensor], scheme: Scheme) -> None:
    if not any(tensor.modules for tensor in tensors):
        raise ModelError("the weights hold no matrix to quantize")
    sizes = {module.inner for tensor in tensors for module in tensor.modules}
    if scheme.group_size and (odd := sorted(size for size in sizes if size % scheme.group_size)):
        fits = [size for size in (128, 64, 32, 16) if not any(each % size for each in sizes)]
        remedy = f"use --group-size {fits[0]}" if fits else "choose W8A8 or FP8_DYNAMIC, which have no groups"
        raise ArgumentError(
            "--group-size", f"{scheme.group_size} does not divide the model's rows of {odd[0]} elements; {remedy}"
        )


def _specs(tensors: list[_Tensor], scheme: Scheme) -> dict[str, torch.Tensor]:
    return {name: spec for tensor in tensors for name, spec in tensor.specs(scheme).items()}


def _ignored(tensors: list[_Tensor], weight_names: WeightNames, config: ModelConfig) -> list[str]:
    """Return the names of the linear modules that are not quantized, such as routers and the head (tied or not)."""
    ignored = [weight_names.names["lm_head"]]
    embeddings = {f"{weight_names.names[part]}.weight" for part in ("embed", "positions") if part in weight_names.names}
    for tensor in tensors:
        if not tensor.modules and len(tensor.shape) == 2 and weight_names.canonical(tensor.name) not in embeddings:
            ignored.append(tensor.name.removesuffix(".weight"))
    return list(dict.fromkeys(ignored))


def _write(source: RawTensors, tensor: _Tensor, scheme: Scheme, writer: SafetensorsWriter) -> None:
    if not tensor.modules:
        writer.write(tensor.name, source.read(tensor.name))
    for module in tensor.modules:
        matrix = source.read(tensor.name, module.part).reshape(module.outputs, module.inner)
        if not matrix.float().isfinite().all():
            raise WeightsError(f"{tensor.name} holds nan or infinity: the file is damaged; download it again")
        for name, stored in _named(module, quantized(matrix, scheme)).items():
            writer.write(name, stored)


def _named(module: Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{module.name}.{end}": tensor for end, tensor in tensors.items()}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
