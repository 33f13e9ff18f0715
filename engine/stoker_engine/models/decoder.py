"""The decoder, assembled from the parts that its config names.

The batch is flat: [tokens, hidden], all sequences end to end. Nothing here knows where one ends. The parts and how
they join are drawn in `architectures.decoder_config`.

Slots, which a family's weight names map to the checkpoint's:

    embed  embed_norm  positions  project_in  project_out  final_norm  lm_head         each .weight and, if any, .bias
    layers.{i}.{input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm}
    layers.{i}.{q, k, v, o, q_norm, k_norm}, or those of `layers.mla`
    layers.{i}.{gate, up, down}, or those of `layers.moe`
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from stoker_engine.architectures.decoder_config import LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.backend import AttentionBackend, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.layers.attention import Attention
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.layers.mla import LatentAttention
from stoker_engine.layers.mlp import MLP
from stoker_engine.layers.moe import MoE
from stoker_engine.layers.norm import Norm, make_norm
from stoker_engine.layers.rotary import Rotary, Rotation
from stoker_engine.models.model import StepInputs
from stoker_engine.quant.slot import Slot


class DecoderLayer(nn.Module):
    """Attention and MLP, each with its norms, on one residual stream."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, backend: AttentionBackend, dtype: torch.dtype) -> None:
        super().__init__()
        residual = config.decoder.residual
        self.kind, self.multiplier, self.norms = residual.kind, residual.multiplier, residual.norms

        def norm(name: str) -> Norm | None:
            return make_norm(config.decoder.norm, config.hidden_size, dtype) if name in residual.norms else None

        self.input_norm, self.post_attention_norm = norm("input_norm"), norm("post_attention_norm")
        self.pre_mlp_norm, self.post_mlp_norm = norm("pre_mlp_norm"), norm("post_mlp_norm")
        self.attention = _attention(config, layer, backend, dtype)
        self.mlp = _mlp(config, layer, dtype)

    def forward(
        self, x: torch.Tensor, rotation: Rotation | None, metadata: AttentionMetadata, cache: KVCache
    ) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        normed = _maybe(self.input_norm, x)
        attended = self.attention(normed, rotation, metadata, cache)
        if self.kind == "parallel":
            return x + attended + self.mlp(normed if self.pre_mlp_norm is None else self.pre_mlp_norm(x))
        if self.kind == "post-norm":
            x = _maybe(self.post_attention_norm, x + attended)
            return _maybe(self.post_mlp_norm, x + self.mlp(x))
        x = x + self._weighted(_maybe(self.post_attention_norm, attended))
        fed = self.mlp(_maybe(self.pre_mlp_norm, x))
        return x + self._weighted(_maybe(self.post_mlp_norm, fed))

    __call__ = forward

    def _weighted(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.multiplier == 1.0 else x * self.multiplier

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The places a loader fills, by name."""
        slots = {**self.attention.slots(prefix), **self.mlp.slots(prefix)}
        for name in self.norms:
            slots.update(getattr(self, name).slots(f"{prefix}.{name}"))
        return slots


class Decoder(nn.Module):
    """A decoder-only language model over a paged KV cache. Its tensors are made on torch's default device.

    Args:
        dtype: of weights and activations.
        max_model_len: the longest sequence; it decides how far rotary positions are stretched.

    Raises:
        ModelError: an activation that is not computed here.
    """

    def __init__(self, config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        decoder, hidden = config.decoder, config.hidden_size
        embedding = decoder.embedding
        width = embedding.size or hidden
        self.embed = nn.Parameter(torch.empty(config.vocab_size, width, dtype=dtype), requires_grad=False)
        self.lm_head = MergedLinear(width, {"lm_head": config.vocab_size}, decoder.head.bias, dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed
        self.embed_norm = make_norm(decoder.norm, hidden, dtype) if embedding.norm else None
        self.positions = (
            nn.Parameter(torch.empty(embedding.positions, hidden, dtype=dtype), requires_grad=False)
            if embedding.positions
            else None
        )
        self.project_in = self.project_out = None
        if width != hidden:
            self.project_in = MergedLinear(width, {"project_in": hidden}, False, dtype)
            self.project_out = MergedLinear(hidden, {"project_out": width}, False, dtype)
        # Rounded to the model's dtype, as the reference implementation multiplies in it.
        self.embedding_multiplier = torch.tensor(embedding.multiplier, dtype=dtype, device="cpu").item()
        self.layers = nn.ModuleList(DecoderLayer(config, layer, backend, dtype) for layer in config.layers)
        self.final_norm = make_norm(decoder.norm, hidden, dtype) if decoder.final_norm else None
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self.rotary = Rotary(ropes, max_model_len, dtype, self.embed.device)

    def slots(self) -> dict[str, Slot]:
        """Every place that a checkpoint must fill, by slot name; see above."""
        slots = {"embed.weight": Slot.whole(self.embed.data)}
        if self.positions is not None:
            slots["positions.weight"] = Slot.whole(self.positions.data)
        for name, norm in (("embed_norm", self.embed_norm), ("final_norm", self.final_norm)):
            if norm is not None:
                slots.update(norm.slots(name))
        for linear in (self.project_in, self.project_out, self.lm_head):
            if linear is not None:
                slots.update({name.removeprefix("."): slot for name, slot in linear.slots("").items()})
        if self.config.tie_word_embeddings:
            del slots["lm_head.weight"]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots.update(layer.slots(f"layers.{index}"))
        return slots

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Runs one step.

        Returns:
            [tokens, hidden], normalised, ready for `logits`.
        """
        x = functional.embedding(inputs.token_ids, self.embed)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        if self.positions is not None:
            offset = self.config.decoder.embedding.position_offset
            x = x + functional.embedding(inputs.positions + offset if offset else inputs.positions, self.positions)
        x = _maybe(self.embed_norm, x)
        rotations = self.rotary.at(inputs.positions)
        for layer, config, cache in zip(self.layers, self.config.layers, inputs.caches, strict=True):
            rotation = None if config.rope is None else rotations[config.rope]
            x = layer(x, rotation, inputs.attention, cache)
        x = _maybe(self.final_norm, x)
        return x if self.project_out is None else self.project_out(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocabulary] float32."""
        head = self.config.decoder.head
        logits: torch.Tensor = self.lm_head(hidden).float()
        if head.multiplier != 1.0:
            logits *= head.multiplier
        if head.soft_cap is not None:  # in place: logits are large
            logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
        return logits


def _maybe(norm: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


def _attention(
    config: ModelConfig, layer: LayerConfig, backend: AttentionBackend, dtype: torch.dtype
) -> Attention | LatentAttention:
    attention = layer.attention
    if attention.latent is None:
        return Attention(attention, config.hidden_size, backend, dtype)
    return LatentAttention(
        attention.latent,
        config.hidden_size,
        attention.num_heads,
        attention.scale,
        config.decoder.norm.eps,
        attention.qkv_bias,
        backend,
        dtype,
    )


def _mlp(config: ModelConfig, layer: LayerConfig, dtype: torch.dtype) -> MLP | MoE:
    if layer.moe is None:
        return MLP(layer.mlp, config.hidden_size, dtype)
    return MoE(layer.moe, config.hidden_size, layer.mlp.act, dtype)
