"""What distinguishes one family of decoders from another, as data.

Our slot names, which a family's weight names map to the checkpoint's:

    embed.weight  final_norm.weight  lm_head.weight
    layers.{i}.{input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm, q_norm, k_norm}.weight
    layers.{i}.{q, k, v, o, gate, up, down}.{weight, bias}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from stoker_engine.contract.model_config import ModelConfig


@dataclass(frozen=True)
class WeightNames:
    """How one file format spells a family's weights.

    Attributes:
        names: our slot, without ``.weight``/``.bias``, to the checkpoint's name; ``{i}`` is the layer.
        renames: (pattern, replacement) applied to a checkpoint's names first: prefixes that differ by wrapper.
        ignored: patterns of tensors that the family is known to carry and we do not need.
        norm_offset: added to norm weights on loading (Gemma's checkpoints store weight - 1).
    """

    names: Mapping[str, str]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    norm_offset: float = 0.0

    def slot_of(self, num_layers: int) -> dict[str, str]:
        """Checkpoint name, without suffix, → our slot, for a model of so many layers."""
        table = {}
        for slot, name in self.names.items():
            for layer in range(num_layers) if "{i}" in slot else (0,):
                table[name.replace("{i}", str(layer))] = slot.replace("{i}", str(layer))
        return table

    def canonical(self, name: str) -> str:
        """The checkpoint's `name` without wrapper-dependent prefixes."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def is_ignored(self, name: str) -> bool:
        """Whether `name` is known and not needed."""
        return any(re.search(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class Family:
    """One family of decoders.

    Attributes:
        safetensors, gguf: weight names by file format; None: the format is not read for this family.
        sandwich_norms: attention and MLP outputs are normalised too, before they join the residual.
        qk_norm: queries and keys are normalised a head at a time, before the rotation.
        wide_norms: norm weights stay float32, and products are rounded last (see `rms_norm`).
        scaled_embedding: embeddings are multiplied by √hidden_size.
        check: raises `ModelError` for a config this description does not cover.
    """

    safetensors: WeightNames
    gguf: WeightNames | None = None
    sandwich_norms: bool = False
    qk_norm: bool = False
    wide_norms: bool = False
    scaled_embedding: bool = False
    check: Callable[[ModelConfig], None] = lambda config: None

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of norm weights in a model of `dtype`."""
        return torch.float32 if self.wide_norms else dtype
