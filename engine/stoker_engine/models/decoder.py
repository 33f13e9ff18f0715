"""Decoder built from the parts that its config names.

The batch is flat: [tokens, hidden], the tokens of all sequences concatenated. Only attention depends on the sequences'
boundaries. `architectures.decoder_config` draws the parts and how they are connected.

Names of the parameters without .weight, .bias or .columns, to which a family's weight names map the files' tensors:

    embed  embed_norm  positions  project_in  project_out  final_norm  lm_head
    layers.{i}.{input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm}
    layers.{i}.{q, k, v, o, q_norm, k_norm, sinks}, or those of `layers.mla`
    layers.{i}.{q_norm.{j}, k_norm.{j}}, if each head has its own norms
    layers.{i}.{gate, up, down}, or those of `layers.moe`

A pipeline stage has its own layers, named by their index in the whole model. The first stage also has the parts before
the layers, the last stage the parts after the layers and, if the head is tied, a copy of the embedding. Stages pass on
the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, overload

import torch
from torch import nn
from torch.nn import functional

from stoker_engine.architectures.decoder_config import LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.backend import (
    AttentionPlan,
    KVCache,
    LayerParts,
    NormParts,
    WholeLayers,
    runs_layers,
)
from stoker_engine.kernels.bundle import Activations
from stoker_engine.layers.attention import Attention
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.layers.embedding import Embedding, Head
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.layers.mla import LatentAttention
from stoker_engine.layers.mlp import MLP
from stoker_engine.layers.moe import MoE
from stoker_engine.layers.norm import Norm, QuantizedRMSNorm, RMSNorm, make_norm
from stoker_engine.layers.rotary import Rotary, Rotation
from stoker_engine.models.model import StepInputs
from stoker_engine.quant.weight_target import Shard, WeightTarget


class ResidualStream(NamedTuple):
    """The residual stream, with an addition that is deferred so that it can be fused with the following norm.

    Attributes:
        x, added: [tokens, hidden]; the stream is their sum, or `x` if `added` is None.
    """

    x: torch.Tensor
    added: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """The residual stream [tokens, hidden]."""
        return self.x if self.added is None else self.x + self.added

    @overload
    def normed(self, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def normed(self, norm: Norm | QuantizedRMSNorm | None) -> tuple[torch.Tensor, Activations]: ...

    def normed(self, norm: Norm | QuantizedRMSNorm | None) -> tuple[torch.Tensor, Activations]:
        """Return the residual stream and its normalised value; the stream twice if `norm` is None."""
        if self.added is None:
            return self.x, self.x if norm is None else norm(self.x)
        if norm is None:
            total = self.x + self.added
            return total, total
        return norm.after_sum(self.x, self.added)


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms on one residual stream.

    Args:
        prefix: start of the layer's parameter names, such as ``layers.3``.
        space: row space of the activations after attention.
    """

    def __init__(self, build: Build, prefix: str, config: ModelConfig, layer: LayerConfig, space: RowSpace) -> None:
        super().__init__()
        residual = config.decoder.residual
        self.kind, self.multiplier, self.norms = residual.kind, residual.multiplier, residual.norms

        def norm(name: str) -> Norm | None:
            if name not in residual.norms:
                return None
            return make_norm(build, f"{prefix}.{name}", config.decoder.norm, config.hidden_size)

        self.input_norm, self.post_attention_norm = norm("input_norm"), norm("post_attention_norm")
        self.pre_mlp_norm, self.post_mlp_norm = norm("pre_mlp_norm"), norm("post_mlp_norm")
        self.attention = _attention(build, prefix, config, layer, space)
        self.mlp = _mlp(build, prefix, config, layer, space)
        self._dtype, self._hidden, self._rope = build.dtype, config.hidden_size, layer.rope
        self._quantizing = build.kernels.quantizing
        self._quantized_input_norm: QuantizedRMSNorm | None = None
        self._quantized_mlp_norm: QuantizedRMSNorm | None = None

    def quantize_early(self) -> None:
        """Let norms and activations quantize their results where all linear operations that read them take quantized
        inputs, which saves launches. Call this after all weights are loaded and prepacked."""
        of_attention, of_mlp = self.attention.quantize_early(), self.mlp.quantize_early()
        if self.kind != "sequential":
            return
        if of_attention in self._quantizing and isinstance(self.input_norm, RMSNorm):
            self._quantized_input_norm = QuantizedRMSNorm(self.input_norm, self._quantizing[of_attention])
        if of_mlp in self._quantizing and isinstance(self.pre_mlp_norm, RMSNorm):
            self._quantized_mlp_norm = QuantizedRMSNorm(self.pre_mlp_norm, self._quantizing[of_mlp])

    def parts(self, cos_sin: int | None) -> LayerParts | None:
        """Return the parts from which a backend computes the whole layer in one call; None if the layer has parts that
        such a call does not support. Call this after all weights are loaded and prepacked.

        Args:
            cos_sin: index of the layer's rotary embedding among this stage's; None: no rotation.
        """
        attention, mlp = self.attention, self.mlp
        norms = {name: getattr(self, name) for name in self.norms}
        if self.kind != "sequential" or not all(isinstance(norm, RMSNorm) for norm in norms.values()):
            return None
        if not isinstance(attention, Attention) or not attention.can_be_fused() or not isinstance(mlp, MLP):
            return None
        return LayerParts(
            dtype=self._dtype,
            hidden=self._hidden,
            norms={name: NormParts(norm.weight.data, norm.eps) for name, norm in norms.items()},
            multiplier=self.multiplier,
            shape=attention.shape,
            head_norm=attention.head_norm,
            qkv=attention.qkv.linear,
            out=attention.out.linear,
            up=mlp.up.linear,
            down=mlp.down.linear,
            rotary_dim=0 if self._rope is None else self._rope.rotary_dim,
            cos_sin=cos_sin,
            interleaved=self._rope is not None and self._rope.interleaved,
            activation=mlp.config.act,
            gated=mlp.config.gated,
        )

    def forward(
        self,
        stream: ResidualStream,
        rotation: Rotation | None,
        plan: AttentionPlan,
        cache: KVCache,
        rows: torch.Tensor | None = None,
    ) -> ResidualStream:
        """Return the residual stream after the layer.

        Args:
            rows: tokens to compute after attention; None: all. Given only for the model's last layer, whose outputs no
                other token attends to.
        """
        x, normed = stream.normed(self._quantized_input_norm or self.input_norm)
        attended = self.attention.attend(normed, rotation, plan, cache)
        if rows is not None:
            x, attended = x[rows], attended[rows]
            if not len(rows):
                return ResidualStream(x)
        attended = self.attention.project(attended)
        if self.kind == "parallel":
            assert isinstance(normed, torch.Tensor)
            if self.pre_mlp_norm is not None:
                normed = self.pre_mlp_norm(x)
            elif rows is not None:
                normed = normed[rows]
            return ResidualStream(x + attended, self.mlp(normed))
        if self.kind == "post-norm":
            _, x = ResidualStream(x, attended).normed(self.post_attention_norm)
            _, x = ResidualStream(x, self.mlp(x)).normed(self.post_mlp_norm)
            return ResidualStream(x)
        x, normed = ResidualStream(x, self._weighted(_maybe(self.post_attention_norm, attended))).normed(
            self._quantized_mlp_norm or self.pre_mlp_norm
        )
        return ResidualStream(x, self._weighted(_maybe(self.post_mlp_norm, self.mlp(normed))))

    __call__ = forward

    def _weighted(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.multiplier == 1.0 else x * self.multiplier

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        targets = {**self.attention.weight_targets(), **self.mlp.weight_targets()}
        for name in self.norms:
            targets.update(getattr(self, name).weight_targets())
        return targets


@dataclass(frozen=True, eq=False)
class LayerRun:
    """Consecutive layers.

    Attributes:
        start: index of the first layer within this pipeline stage.
        whole: computes all layers in one call; None: they run one by one, operation by operation.
    """

    start: int
    layers: list[DecoderLayer]
    whole: WholeLayers | None = None

    @property
    def layer_slice(self) -> slice:
        """The layers' indices within this pipeline stage."""
        return slice(self.start, self.start + len(self.layers))


class Decoder(nn.Module):
    """A decoder-only language model over a paged KV cache. Its tensors are allocated on torch's default device.

    Args:
        build: settings of the layers. Each rank holds its shard of the model, each pipeline stage its layers.
        max_model_len: maximum length of a sequence in tokens; some rotary embeddings depend on it.

    Attributes:
        runs: consecutive runs of this stage's layers.

    Raises:
        ModelError: an activation is not supported, or a dimension cannot be split across the ranks.
    """

    def __init__(self, config: ModelConfig, build: Build, max_model_len: int) -> None:
        super().__init__()
        self.config, self.backend = config, build.backend
        self._rows = None if build.extend is None else build.rows
        decoder, hidden, stage = config.decoder, config.hidden_size, build.stage
        embedding = decoder.embedding
        width = embedding.size or hidden
        self.embed = self.lm_head = self.embed_norm = self.final_norm = None
        has_head = stage.is_last and build.has_head
        if stage.is_first or (has_head and config.tie_word_embeddings):
            self.embed = Embedding(build, "embed", config.vocab_size, width)
        if has_head:
            tied = self.embed if config.tie_word_embeddings else None
            self.lm_head = Head(build, "lm_head", config.vocab_size, width, decoder.head.bias, tied)
        if stage.is_last and decoder.final_norm:
            self.final_norm = make_norm(build, "final_norm", decoder.norm, hidden)
        if stage.is_first and embedding.norm:
            self.embed_norm = make_norm(build, "embed_norm", decoder.norm, hidden)
        self.positions = (
            nn.Parameter(torch.empty(embedding.positions, hidden, dtype=build.dtype), requires_grad=False)
            if embedding.positions and stage.is_first
            else None
        )
        self.project_in = self.project_out = None
        if width != hidden:
            narrow, wide = Shard.whole(width), Shard.whole(hidden)
            if stage.is_first:
                self.project_in = MergedLinear(build, "", narrow, {"project_in": wide}, False)
            if stage.is_last:
                parts = {"project_out": narrow}
                self.project_out = MergedLinear(build, "", wide, parts, False, space=RowSpace.KEPT)
        # Rounded to the model's dtype, in which the reference implementation multiplies.
        self.embedding_multiplier = torch.tensor(embedding.multiplier, dtype=build.dtype, device="cpu").item()
        local = stage.layers(len(config.layers))
        self.layer_configs = config.layers[local.start : local.stop]
        layers = [
            DecoderLayer(
                build, f"layers.{index}", config, layer, RowSpace.KEPT if index == local[-1] else RowSpace.TOKENS
            )
            for index, layer in zip(local, self.layer_configs, strict=True)
        ]
        self.layers = nn.ModuleList(layers)
        ropes = list(dict.fromkeys(layer.rope for layer in self.layer_configs if layer.rope is not None))
        self.rotary = Rotary(ropes, max_model_len, build.dtype, build.kernels, torch.get_default_device())
        self._angles = [None if layer.rope is None else ropes.index(layer.rope) for layer in self.layer_configs]
        self.runs = [LayerRun(0, layers)]
        self._first, self._hidden_after = local.start, build.hidden_after

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name (see the module's docstring)."""
        targets = dict[str, WeightTarget]()
        if self.positions is not None:
            targets["positions.weight"] = WeightTarget.whole(self.positions.data)
        parts = (self.embed, self.lm_head, self.embed_norm, self.final_norm, self.project_in, self.project_out)
        for part in parts:
            if part is not None:
                targets.update(part.weight_targets())
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            targets.update(layer.weight_targets())
        return targets

    def quantize_early(self) -> None:
        """See `DecoderLayer.quantize_early`."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.quantize_early()

    def fuse(self) -> None:
        """Let the backend compute consecutive layers in one call where it can. A call ends after each layer of
        `Build.hidden_after`. Call this after all weights are loaded and prepacked."""
        backend = self.backend
        if not runs_layers(backend):
            return
        layers, first = [layer for run in self.runs for layer in run.layers], self._first
        parts: list[LayerParts | None] = []
        for layer, cos_sin in zip(layers, self._angles, strict=True):
            layer_parts = layer.parts(cos_sin)
            parts.append(layer_parts if layer_parts is not None and backend.takes(layer_parts) else None)
        num_before = [sum(number < first + index for number in self._hidden_after) for index in range(len(layers))]
        self.runs = []
        for _, indices in groupby(range(len(layers)), lambda index: (parts[index] is None, num_before[index])):
            start, *following = indices
            run = slice(start, start + 1 + len(following))
            whole = [layer_parts for layer_parts in parts[run] if layer_parts is not None]
            self.runs.append(LayerRun(start, layers[run], backend.layers(whole) if whole else None))

    def forward(self, inputs: StepInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        stream = ResidualStream(self._embedded(inputs) if hidden is None else hidden)
        rotations = self.rotary.at(inputs.positions)
        for run in self.runs:
            caches, rows = inputs.caches[run.layer_slice], inputs.rows if run is self.runs[-1] else None
            if run.whole is not None:
                batch_rows = self._batch_rows(rows)
                stream = ResidualStream(run.whole(stream.total, rotations, inputs.attention, caches, rows, *batch_rows))
                self._keep_hidden(inputs, run.start + len(run.layers) - 1, stream)
                continue
            for index, (layer, cache) in enumerate(zip(run.layers, caches, strict=True), start=run.start):
                cos_sin = self._angles[index]
                rotation = None if cos_sin is None else rotations[cos_sin]
                rows_of_layer = rows if layer is run.layers[-1] else None
                stream = layer(stream, rotation, inputs.attention, cache, rows_of_layer)
                self._keep_hidden(inputs, index, stream)
        _, x = stream.normed(self.final_norm)
        return x if self.project_out is None else self.project_out(x)

    def _keep_hidden(self, inputs: StepInputs, index: int, stream: ResidualStream) -> None:
        """If layer `index` of this stage is in `Build.hidden_after`, store a copy of the residual stream after it."""
        if self._first + index in self._hidden_after:
            inputs.hidden_states[self._first + index] = stream.total.clone()  # calls of whole layers update it in place

    def _batch_rows(self, rows: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the input-batch rows of all tokens, and of the tokens in `rows` (None if `rows` is None). Without
        adapters, both are None."""
        if self._rows is None:
            return None, None
        return self._rows[RowSpace.TOKENS], None if rows is None else self._rows[RowSpace.KEPT]

    def _embedded(self, inputs: StepInputs) -> torch.Tensor:
        """Return the embeddings of the step's tokens, [tokens, hidden]."""
        assert self.embed is not None
        x = self.embed(inputs.token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        if self.positions is not None:
            offset = self.config.decoder.embedding.position_offset
            x = x + functional.embedding(inputs.positions + offset if offset else inputs.positions, self.positions)
        return _maybe(self.embed_norm, x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        assert self.lm_head is not None
        head = self.config.decoder.head
        logits: torch.Tensor = self.lm_head(hidden)
        if head.multiplier == 1.0 and head.soft_cap is None:
            return logits
        logits = logits.float()
        if head.multiplier != 1.0:
            logits *= head.multiplier
        if head.soft_cap is not None:  # in place: logits are large
            logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
        return logits


def _maybe(norm: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


def _attention(
    build: Build, prefix: str, config: ModelConfig, layer: LayerConfig, space: RowSpace
) -> Attention | LatentAttention:
    attention = layer.attention
    if attention.latent is None:
        return Attention(build, prefix, attention, config.hidden_size, space)
    return LatentAttention(
        build,
        prefix,
        attention.latent,
        config.hidden_size,
        attention.num_heads,
        attention.scale,
        config.decoder.norm.eps,
        attention.qkv_bias,
        space,
    )


def _mlp(build: Build, prefix: str, config: ModelConfig, layer: LayerConfig, space: RowSpace) -> MLP | MoE:
    if layer.moe is None:
        return MLP(build, prefix, layer.mlp, config.hidden_size, space)
    return MoE(build, prefix, layer.moe, config.hidden_size, layer.mlp.act, space)
