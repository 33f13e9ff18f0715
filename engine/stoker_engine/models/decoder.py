"""The decoder, assembled from a config and a family's description.

    tokens → embed → [ norm → attention → (norm) → +  norm → MLP → (norm) → + ] × layers → norm → lm_head

The batch is flat: [tokens, hidden], all sequences end to end. Nothing here knows where one ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from stoker_engine.attention.backend import AttentionBackend, AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.contract.model_config import LayerConfig, ModelConfig, RopeParameters
from stoker_engine.kernels.activation import activation
from stoker_engine.kernels.rotary import apply_rotary
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.layers.norm import RMSNorm
from stoker_engine.layers.rotary import Rotary
from stoker_engine.models.family import Family

Rotation = dict[RopeParameters, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class StepInputs:
    """What a forward pass needs.

    Attributes:
        token_ids, positions: [tokens] int64.
        sample_rows: [samples] rows whose logits are wanted.
        caches: one a layer.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    attention: AttentionMetadata
    caches: list[KVCache]


class Attention(nn.Module):
    """Grouped-query self-attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        family: Family,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.rope = layer.rope
        self.backend = backend
        self.shape = AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.query_pre_attn_scalar**-0.5,
            sliding_window=layer.sliding_window,
        )
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.widths = [width, kv_width, kv_width]
        self.qkv = MergedLinear(
            config.hidden_size, {"q": width, "k": kv_width, "v": kv_width}, config.attention_bias, dtype
        )
        self.out = MergedLinear(width, {"o": config.hidden_size}, config.attention_bias, dtype)
        norm_dtype = family.norm_dtype(dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, norm_dtype) if family.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, norm_dtype) if family.qk_norm else None

    def forward(self, x: torch.Tensor, rotation: Rotation, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        query, key, value = (
            part.unflatten(-1, (-1, self.shape.head_dim)) for part in self.qkv(x).split(self.widths, dim=-1)
        )  # each [tokens, heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = rotation[self.rope]
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        attended = self.backend.forward(self.shape, query, key, value, cache, inputs.attention)
        return self.out(attended)  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """down(act(gate(x)) × up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up = MergedLinear(config.hidden_size, {"gate": size, "up": size}, config.mlp_bias, dtype)
        self.down = MergedLinear(size, {"down": config.hidden_size}, config.mlp_bias, dtype)
        self.act = activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and MLP, each with its norms, on one residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        family: Family,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, family.norm_dtype(dtype))

        self.input_norm, self.pre_mlp_norm = norm(), norm()
        self.attention = Attention(config, layer, family, backend, dtype)
        self.mlp = GatedMLP(config, dtype)
        self.post_attention_norm: nn.Module = norm() if family.sandwich_norms else nn.Identity()
        self.post_mlp_norm: nn.Module = norm() if family.sandwich_norms else nn.Identity()

    def forward(self, x: torch.Tensor, rotation: Rotation, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        attended = self.attention(self.input_norm(x), rotation, inputs, cache)
        x = x + self.post_attention_norm(attended)
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))  # type: ignore[no-any-return]

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """The layer's tensors by slot name; see `models.family`."""
        slots = {
            **self.attention.qkv.slots(prefix),
            **self.attention.out.slots(prefix),
            **self.mlp.gate_up.slots(prefix),
            **self.mlp.down.slots(prefix),
        }
        norms = {
            "input_norm": self.input_norm,
            "post_attention_norm": self.post_attention_norm,
            "pre_mlp_norm": self.pre_mlp_norm,
            "post_mlp_norm": self.post_mlp_norm,
            "q_norm": self.attention.q_norm,
            "k_norm": self.attention.k_norm,
        }
        for name, norm in norms.items():
            if isinstance(norm, RMSNorm):
                slots[f"{prefix}.{name}.weight"] = norm.weight
        return slots


class Decoder(nn.Module):
    """A decoder-only language model over a paged KV cache.

    Args:
        dtype: of weights and activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype), requires_grad=False)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, family, backend, dtype) for layer in config.layers)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, family.norm_dtype(dtype))
        self.lm_head = (
            self.embed
            if config.tie_word_embeddings
            else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype), requires_grad=False)
        )
        self.rotary = Rotary({layer.rope for layer in config.layers}, config.head_dim, dtype)
        # Rounded to the model's dtype, as the reference implementation multiplies in it.
        scale = torch.tensor(config.hidden_size**0.5).to(dtype).item() if family.scaled_embedding else 1.0
        self.embedding_scale = scale

    def slots(self) -> dict[str, torch.Tensor]:
        """Every tensor that a checkpoint must fill, by slot name; see `models.family`."""
        slots = {"embed.weight": self.embed.data, "final_norm.weight": self.final_norm.weight.data}
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self.lm_head.data
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots.update(layer.slots(f"layers.{index}"))
        return slots

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Runs one step.

        Returns:
            [samples, vocabulary] float32 logits of `inputs.sample_rows`.
        """
        x = functional.embedding(inputs.token_ids, self.embed)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        rotation = self.rotary.at(inputs.positions)
        for layer, cache in zip(self.layers, inputs.caches, strict=True):
            x = layer(x, rotation, inputs, cache)
        logits = functional.linear(self.final_norm(x[inputs.sample_rows]), self.lm_head).float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
