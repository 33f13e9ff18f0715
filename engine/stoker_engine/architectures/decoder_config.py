"""Parts of a decoder, as data.

    tokens → embedding → (+ positions) → (norm) → layers → (norm) → head → logits

    one layer, by residual layout:

      sequential   x = x + m · after(attention(before(x)))      x = x + m · after(mlp(before(x)))
      parallel     x = x + attention(n) + mlp(n')               n = input_norm(x), n' = n or pre_mlp_norm(x)
      post-norm    x = norm(x + attention(x))                   x = norm(x + mlp(x))

In the sequential layout, *before* and *after* are norms, or the identity: pre-norm layers have only *before* (Llama),
OLMo 2's only *after*, and layers with sandwich norms both (Gemma 2). Each family selects parts
(`architectures.families`), `models.decoder` builds them, and `sizing.weight_sizes` computes their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker_engine.architectures.activation import Activation
from stoker_engine.architectures.cache_spec import CacheSpec, LayerCache
from stoker_engine.architectures.mla_config import MLAConfig
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.rope_config import RopeParameters

NormName = Literal["input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"]


@dataclass(frozen=True)
class NormConfig:
    """A normalisation.

    Attributes:
        weight, bias: whether the norm has weights and biases.
        wide: the weights are float32, and the result is rounded after the multiplication (Gemma, OLMo 2).
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False
    wide: bool = False


@dataclass(frozen=True)
class QKNormConfig:
    """Normalisation of queries and keys before rotation.

    Attributes:
        over: ``head``: each head, with shared weights (Qwen 3); ``each``: each head, with its own weights (Cohere);
            ``full``: all heads together (OLMo 2).
    """

    norm: NormConfig
    over: Literal["head", "each", "full"]


@dataclass(frozen=True)
class AttentionConfig:
    """Self-attention of one layer.

    Attributes:
        scale: factor of the scores.
        rope: rotary embedding; None: none.
        alibi_slopes: ALiBi slope of each head; None: no ALiBi.
        sliding_window: number of visible tokens, including the current one; None: all.
        logits_soft_cap: scores s become cap × tanh(s / cap); None: no cap.
        clip_qkv: queries and keys (after their norms) and values are clamped to ± this value; None: not clamped.
        sinks: the softmax of each head includes a learned score, which has no value (gpt-oss).
        latent: latent attention, which stores one latent per token and defines the heads' sizes; None: ordinary
            attention.
        value_head_dim: size of a value head; None: the same as a key head. Only the Transformers backend sets it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeParameters | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sliding_window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNormConfig | None = None
    logits_soft_cap: float | None = None
    clip_qkv: float | None = None
    sinks: bool = False
    latent: MLAConfig | None = None
    value_head_dim: int | None = None

    @property
    def cache(self) -> CacheSpec:
        """Cache of the layer: the entry of one token, and the window."""
        if self.latent is not None:
            return self.latent.cache
        return CacheSpec(self.num_kv_heads, self.head_dim, self.value_head_dim or self.head_dim, self.sliding_window)


@dataclass(frozen=True)
class MLPConfig:
    """A feed-forward block.

    Attributes:
        size: inner size.
        act: activation; `ClampedSwiGLU` requires `gated`, and itself combines gate and up.
        gated: down(act(gate(x)) × up(x)) instead of down(act(up(x))).
    """

    size: int
    act: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer.

    Attributes:
        moe: mixture of experts that replaces the MLP and uses its activation; None: the layer has the MLP.
    """

    attention: AttentionConfig
    mlp: MLPConfig
    moe: MoEConfig | None = None

    @property
    def cache(self) -> LayerCache:
        """Cache of the layer."""
        return self.attention.cache

    @property
    def rope(self) -> RopeParameters | None:
        """Rotary embedding; None: none."""
        return self.attention.rope

    @property
    def sliding_window(self) -> int | None:
        """Number of visible tokens, including the current one; None: all."""
        return self.attention.sliding_window


@dataclass(frozen=True)
class ResidualConfig:
    """How attention and MLP are added to the residual stream; see the module's docstring.

    Attributes:
        norms: norms of each layer.
        multiplier: m (Granite).
    """

    kind: Literal["sequential", "parallel", "post-norm"] = "sequential"
    norms: tuple[NormName, ...] = ("input_norm", "pre_mlp_norm")
    multiplier: float = 1.0


@dataclass(frozen=True)
class EmbeddingConfig:
    """Token embedding, with learned positions if the model has them.

    Attributes:
        multiplier: factor of the vectors.
        size: size of a vector; None: the hidden size. Vectors of another size are projected to the hidden size, and
            back before the head.
        norm: whether the vectors are normalised (BLOOM).
        positions: rows in the table of learned positions, which are added to the vectors; 0: there is no table.
        position_offset: row of position 0 in the table (OPT: 2).
    """

    multiplier: float = 1.0
    size: int | None = None
    norm: bool = False
    positions: int = 0
    position_offset: int = 0


@dataclass(frozen=True)
class HeadConfig:
    """Output head.

    Attributes:
        multiplier: factor of the logits.
        soft_cap: logits l become cap × tanh(l / cap), after the multiplication; None: no cap.
    """

    bias: bool = False
    multiplier: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """All parts of one decoder.

    Attributes:
        norm: configuration of all norms except those within attention.
        final_norm: whether there is a norm after the last layer.
    """

    norm: NormConfig
    layers: tuple[LayerConfig, ...]
    residual: ResidualConfig = ResidualConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    head: HeadConfig = HeadConfig()
    final_norm: bool = True
