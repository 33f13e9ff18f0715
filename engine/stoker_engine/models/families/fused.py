"""Tensors in which files keep several of our slots, or one in another form."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.models.families.weight_names import MovesRows, Transposed
from stoker_engine.quant.weight_target import WeightTarget

#: Inputs in rows instead of outputs (GPT-2's Conv1D).
transposed = Transposed(0, 1)


@MovesRows
def rows(tensor: torch.Tensor, slots: Sequence[WeightTarget], config: ModelConfig) -> Sequence[torch.Tensor]:
    """One after the other: all queries, all keys, all values; or the gate, then the up projection."""
    sizes = [slot.full_shape[0] for slot in slots]
    if sum(sizes) != len(tensor):
        raise WeightsError(f"a fused tensor has {len(tensor)} rows, the model needs {sizes}")
    return list(torch.split(tensor, sizes))


@MovesRows
def by_kv_head(tensor: torch.Tensor, slots: Sequence[WeightTarget], config: ModelConfig) -> Sequence[torch.Tensor]:
    """One key and value head after the other, each behind the queries that share it (BLOOM, GPT-NeoX, InternLM 2).

    ::

        │ q q q q k v │ q q q q k v │ …        each letter head_dim rows
    """
    sizes = [slot.full_shape[0] for slot in slots]
    if sum(sizes) != len(tensor):
        raise WeightsError(f"a fused tensor has {len(tensor)} rows, the model needs {sizes}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = heads // kv_heads
    grouped = tensor.reshape(kv_heads, group + 2, -1, *tensor.shape[1:])  # [kv_heads, group + 2, head_dim, …]
    return [part.flatten(0, 2) for part in (grouped[:, :group], grouped[:, group : group + 1], grouped[:, group + 1 :])]


def plus_one(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Less by one, as Gemma's norm weights are stored; float32."""
    return tensor.float() + 1.0


@MovesRows
def each_row(tensor: torch.Tensor, slots: Sequence[WeightTarget], config: ModelConfig) -> Sequence[torch.Tensor]:
    """A row for each head, or each expert."""
    if len(tensor) != len(slots):
        raise WeightsError(f"a tensor has {len(tensor)} rows, the model needs {len(slots)}")
    return tensor.unbind(0)
