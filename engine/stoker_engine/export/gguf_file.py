"""Converts the matrices of a GGUF file to another type with the gguf library; metadata are copied.

Norms, biases, routers and position embeddings are not converted to that type, nor are matrices whose rows are not a
whole number of its blocks: they keep a floating type, and quantized ones become float32 or float16. The embedding and
the head get at least 8 bits, as llama.cpp also stores them more precisely.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType
from gguf.quants import quantize
from tqdm import tqdm

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.export.output import new_output
from stoker_engine.models.gguf.gguf_file import FLOATING, GGUFFile
from stoker_engine.models.gguf.gguf_header import GGUFHeader

#: Supported types → llama.cpp's number of the file type.
FILE_TYPES: Final = {
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    GGMLQuantizationType.Q5_1: LlamaFileType.MOSTLY_Q5_1,
    GGMLQuantizationType.Q5_0: LlamaFileType.MOSTLY_Q5_0,
    GGMLQuantizationType.Q4_1: LlamaFileType.MOSTLY_Q4_1,
    GGMLQuantizationType.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    GGMLQuantizationType.BF16: LlamaFileType.MOSTLY_BF16,
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
}
_ENDS: Final = ("token_embd.weight", "output.weight")
_STAYS: Final = re.compile(r"norm|ffn_gate_inp|position_embd|token_types|^rope_|altup|laurel|per_layer_model_proj")
#: Approximate number of elements quantized at a time.
_PIECE: Final = 1 << 22
#: Number of float16 values at the start of a block: its scale, and its minimum if it has one; for F16, the element.
_SCALES: Final = {
    GGMLQuantizationType.F16: 1,
    GGMLQuantizationType.Q8_0: 1,
    GGMLQuantizationType.Q5_1: 2,
    GGMLQuantizationType.Q5_0: 1,
    GGMLQuantizationType.Q4_1: 2,
    GGMLQuantizationType.Q4_0: 1,
}
_UINT32: Final = 4
_ALIGNMENT: Final = 32


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the new file.

    Attributes:
        kind: ggml type in the new file.
        start: offset of its data in the data section, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes


def export(path: Path, kind: GGMLQuantizationType, target: Path) -> None:
    """Convert the matrices of the GGUF file at `path` to type `kind`, and write the new file to `target`, or into the
    new folder `target` if its name does not end with ``.gguf``.

    Raises:
        ModelError: the file is already quantized and `kind` is not a floating type; no matrix can be of type `kind`; or
            the file cannot be read.
        WeightsError: it contains NaN, infinity, or values that are too large for `kind`.
        ArgumentError: `target` exists and is no empty folder, or the disk is too full.
        StokerError: writing failed.
    """
    source = GGUFFile(path)
    stored = source.kinds()
    found = source.quantized_as()
    if found is not None and kind not in FLOATING:
        raise ModelError(
            f"{path} is already quantized by {found}, but {kind.name} is requested; pass a file in F16 or BF16 "
            "(stoker quantize --to bf16 converts this one, but does not restore its precision)"
        )
    tensors, end = list[_Tensor](), 0
    for name in source.names():
        shape = tuple(source.shape(name))
        tensors.append(_Tensor(name, shape, _kind_of(name, shape, stored[name], kind), end))
        end += -(-tensors[-1].size // _ALIGNMENT) * _ALIGNMENT
    if not any(tensor.kind == kind and len(tensor.shape) > 1 for tensor in tensors):
        raise ModelError(f"{path} holds no matrix that can be of type {kind.name}, among {len(tensors)} tensors")
    header = _header(path, tensors, kind)
    with new_output(target, len(header) + end) as partial:
        if target.suffix != ".gguf":
            partial.mkdir()
            partial /= f"{path.stem}-{kind.name}.gguf"
        with partial.open("wb") as file:
            file.write(header)
            for tensor in tqdm(tensors, desc="Quantizing weights", unit="tensor", disable=None):
                _write(source, tensor, file)


def _kind_of(
    name: str, shape: tuple[int, ...], stored: GGMLQuantizationType, requested: GGMLQuantizationType
) -> GGMLQuantizationType:
    if len(shape) < 2 or not name.endswith(".weight") or _STAYS.search(name):
        return stored if stored in FLOATING else GGMLQuantizationType.F32
    kind = GGMLQuantizationType.Q8_0 if name in _ENDS and requested not in FLOATING else requested
    if shape[-1] % GGML_QUANT_SIZES[kind][0]:
        return stored if stored in FLOATING else GGMLQuantizationType.F16
    return kind


def _header(path: Path, tensors: list[_Tensor], kind: GGMLQuantizationType) -> bytes:
    """Return everything before the data section: header, metadata and tensor infos."""
    metadata = {key: value for key, value in GGUFHeader(path).stored().items() if not key.startswith("split.")}
    for key, number in (
        ("general.file_type", int(FILE_TYPES[kind])),
        ("general.quantization_version", GGML_QUANT_VERSION),
        ("general.alignment", _ALIGNMENT),
    ):
        metadata[key] = (_UINT32, struct.pack("<I", number))
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    for key, (value_kind, value) in metadata.items():
        parts += [_string(key), struct.pack("<I", value_kind), value]
    for tensor in tensors:
        sizes = tuple(reversed(tensor.shape))
        layout = f"<I{len(sizes)}QIQ"
        parts += [_string(tensor.name), struct.pack(layout, len(sizes), *sizes, int(tensor.kind), tensor.start)]
    header = b"".join(parts)
    return header + bytes(-len(header) % _ALIGNMENT)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _write(source: GGUFFile, tensor: _Tensor, file: BinaryIO) -> None:
    for piece in _pieces(tensor.shape):
        numbers = source.read(tensor.name, piece)
        if not numbers.isfinite().all():
            raise WeightsError(f"{tensor.name} holds nan or infinity: the file is damaged; download it again")
        stored = _stored(numbers, tensor.kind)
        scales = stored.reshape(-1, GGML_QUANT_SIZES[tensor.kind][1])[:, : 2 * _SCALES.get(tensor.kind, 0)]
        if not np.isfinite(np.ascontiguousarray(scales).view(np.float16)).all():
            raise WeightsError(f"{tensor.name} holds values too large for {tensor.kind.name}; choose bf16")
        file.write(stored.data)
    file.write(bytes(-tensor.size % _ALIGNMENT))


def _stored(numbers: torch.Tensor, kind: GGMLQuantizationType) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with np.errstate(over="ignore"):  # overflow of scales, which the caller checks
        array = quantize(np.ascontiguousarray(numbers.numpy()), kind)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Split a tensor of `shape` into pieces of whole rows, in order."""
    if len(shape) < 2:
        yield tuple(slice(0, size) for size in shape)
        return
    for index in np.ndindex(*shape[:-2]):
        rows, step = shape[-2], max(_PIECE // max(shape[-1], 1), 1)
        for start in range(0, rows, step):
            outer = (slice(each, each + 1) for each in index)
            yield (*outer, slice(start, min(start + step, rows)), slice(0, shape[-1]))
