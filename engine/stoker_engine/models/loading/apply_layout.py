"""Convert the files' tensors to parameters, as `architectures.weight_layout` describes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.weight_layout import AddOne, Fused, HalfSplitPairs, Operation, Split, ToRow, Transpose
from stoker_engine.quant.weight_target import WeightTarget


def apply_operation(operation: Operation, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Apply `operation` to a tensor. The result is a view if possible."""
    match operation:
        case Transpose(first, second):
            return tensor.transpose(first, second)
        case AddOne():
            return tensor.float() + 1.0
        case HalfSplitPairs(heads):
            pairs = tensor.unflatten(0, (getattr(config, heads), -1, 2))
            return pairs.transpose(1, 2).flatten(0, 2)  # type: ignore[no-any-return]
        case ToRow():
            return tensor.view(1, -1)


def split_fused(
    fused: Fused, tensor: torch.Tensor, targets: Sequence[WeightTarget], config: ModelConfig
) -> Sequence[torch.Tensor]:
    """Split a fused tensor into its parts.

    Args:
        targets: targets of the parts that `tensor` holds, possibly only some experts of a stack. Only the targets'
            number and full shapes are used.

    Raises:
        WeightsError: the number of rows or experts is wrong.
    """
    if fused.split is Split.FLAT_EXPERTS:
        experts = tensor.chunk(len(targets))
        return [expert.T for expert in experts] if fused.transposed else experts
    if fused.transposed:
        tensor = tensor.transpose(1, 2)
    match fused.split:
        case Split.ROWS:
            return tensor.split(_sizes(tensor, targets))  # type: ignore[no-any-return]
        case Split.KV_HEADS:
            _sizes(tensor, targets)
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            group = heads // kv_heads
            grouped = tensor.reshape(kv_heads, group + 2, -1, *tensor.shape[1:])  # [kv_heads, group + 2, head_dim, …]
            queries, keys, values = grouped[:, :group], grouped[:, group : group + 1], grouped[:, group + 1 :]
            return [part.flatten(0, 2) for part in (queries, keys, values)]
        case Split.LATENT_HEADS:
            heads, sizes = targets[0].full_shape[0], [target.full_shape[1] for target in targets]
            if len(tensor) != heads * sum(sizes):
                raise WeightsError(f"a fused tensor has {len(tensor)} rows, but the model needs {heads} times {sizes}")
            return tensor.unflatten(0, (heads, -1)).split(sizes, dim=1)  # type: ignore[no-any-return]
        case Split.EACH_ROW:
            if len(tensor) != len(targets):
                raise WeightsError(f"a tensor has {len(tensor)} rows, but the model needs {len(targets)}")
            return tensor.unbind(0)
        case Split.EXPERTS:
            per_expert = len(targets) // len(tensor) if len(tensor) else 0
            if len(targets) != per_expert * len(tensor) or tensor.shape[1] % max(per_expert, 1):
                raise WeightsError(
                    f"a tensor of shape {tuple(tensor.shape)} cannot hold {len(targets)} expert matrices"
                )
            return [part for expert in tensor for part in expert.chunk(per_expert)]
        case Split.INTERLEAVED_EXPERTS:
            return [expert[part::2] for expert in tensor for part in (0, 1)]


def _sizes(tensor: torch.Tensor, targets: Sequence[WeightTarget]) -> list[int]:
    sizes = [target.full_shape[0] for target in targets]
    if sum(sizes) != len(tensor):
        raise WeightsError(f"a fused tensor has {len(tensor)} rows, but the model needs {sizes}")
    return sizes
