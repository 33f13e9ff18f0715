"""One matrix, compressed by compressed-tensors' own compressors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as library_dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch.nn import functional


@dataclass
class Compressed:
    """A random matrix, or `weight`.

    Attributes:
        weights: arguments of its `QuantizationArgs`.
        inputs: those of its activations.
        tensors: the library's output, by names like ``weight_packed``.
    """

    weights: dict[str, Any]
    inputs: dict[str, Any] | None = None
    outputs: int = 40
    inner: int = 128
    scale_dtype: torch.dtype = torch.bfloat16
    format: str = "pack-quantized"
    weight: torch.Tensor | None = None
    tensors: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        inputs = None if self.inputs is None else QuantizationArgs(**self.inputs)
        args = QuantizationArgs(**self.weights)
        self.scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=self.format)
        if self.weight is None:
            generator = torch.Generator().manual_seed(self.outputs * 1000 + self.inner)
            self.weight = torch.randn(self.outputs, self.inner, generator=generator) * 0.1 + 0.02
        self.outputs, self.inner = self.weight.shape
        state = {"weight": self.weight}
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(self.weight.amin(), self.weight.amax())
        bounds = self._bounds(self.weight, args)
        scale, zero = calculate_qparams(*bounds, args, global_scale=state.get("weight_global_scale"))
        state |= {"weight_scale": scale.to(self.scale_dtype) if args.scale_dtype is None else scale.float()}
        if not args.symmetric:
            state["weight_zero_point"] = zero.round().to(torch.int8)
        self.compressor = BaseCompressor.get_value_from_registry(self.format)
        self.tensors = self.compressor.compress(state, self.scheme)

    def _bounds(self, weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the minimum and maximum of the elements that share a scale."""
        if args.strategy == "tensor":
            return weight.amin().reshape(1), weight.amax().reshape(1)
        if args.strategy == "block":
            high, wide = args.block_structure
            padded = functional.pad(weight, (0, -weight.shape[1] % wide, 0, -weight.shape[0] % high))
            blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)
        else:
            blocks = weight.unflatten(1, (-1, args.group_size if args.group_size else weight.shape[1]))
        return blocks.amin(-1), blocks.amax(-1)

    def decompressed(self) -> torch.Tensor:
        """Decompress with the library, in float32."""
        state = dict(self.tensors)
        if "weight_global_scale" in state:  # its compressor would compute in bfloat16
            codes = unpack_fp4_from_uint8(state["weight_packed"], self.outputs, self.inner, torch.float32)
            scale, second = state["weight_scale"].float(), state["weight_global_scale"]
            return library_dequantize(codes, scale, args=self.scheme.weights, global_scale=second)
        if state["weight_scale"].dtype != torch.uint8:
            state["weight_scale"] = state["weight_scale"].float()
        found: torch.Tensor = self.compressor.decompress(state, self.scheme)["weight"]
        return found.float()

    def stated(self, **changes: Any) -> dict[str, Any]:
        """Return the library's ``quantization_config``, with `changes`."""
        config = QuantizationConfig(config_groups={"group_0": self.scheme}, format=self.format, ignore=["lm_head"])
        written: dict[str, Any] = json.loads(json.dumps(config.model_dump(), default=str))
        return written | changes


def with_columns_shuffled(case: Compressed, group: int, seed: int = 5) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Store weights with activation order like the library until version 0.17: groups of arbitrary columns.

    Args:
        case: 4-bit integers, whose columns are in the order of their groups.

    Returns:
        Its tensors with ``weight_g_idx``, and the column at each position of the order, int64 [inner].
    """
    group_of = torch.randperm(case.inner, generator=torch.Generator().manual_seed(seed)) // group
    order = group_of.sort(stable=True).indices
    codes = case.tensors["weight_packed"].view(torch.uint8)
    shuffled = torch.empty(case.outputs, case.inner, dtype=torch.uint8)
    shuffled[:, order] = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    packed = (shuffled[:, 0::2] | shuffled[:, 1::2] << 4).contiguous().view(torch.int32)
    return {**case.tensors, "weight_packed": packed, "weight_g_idx": group_of.int()}, order
