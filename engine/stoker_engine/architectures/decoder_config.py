"""The parts a decoder is assembled from, as data.

    tokens → embedding → (+ positions) → (norm) → layers → norm → head → logits

    one layer, by its residual layout:

      sequential   x = x + m · after(attention(before(x)))      x = x + m · after(mlp(before(x)))
      parallel     x = x + attention(n) + mlp(n')               n = input_norm(x), n' = n or pre_mlp_norm(x)
      post-norm    x = norm(x + attention(x))                   x = norm(x + mlp(x))

Which norms a layer has says the rest: *before* alone is pre-norm (Llama), *after* alone is OLMo 2's, both are sandwich
norms (Gemma 2). Every family is a choice among these parts (`architectures.families`); `models.decoder` assembles them
and `sizing.weight_sizes` counts them.
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
        kind: by the root mean square, or by mean and variance.
        weight, bias: whether it has them.
        wide: weights stay float32, and the product is rounded last (Gemma, OLMo 2).
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False
    wide: bool = False


@dataclass(frozen=True)
class QKNormConfig:
    """Queries and keys are normalised before they are rotated.

    Attributes:
        over: ``head``: each head, all with the same weights (Qwen 3); ``each``: each head with weights of its own
            (Cohere); ``full``: all heads together (OLMo 2).
    """

    norm: NormConfig
    over: Literal["head", "each", "full"]


@dataclass(frozen=True)
class AttentionConfig:
    """Self-attention of one layer.

    Attributes:
        scale: the scores are multiplied by it.
        rope: rotary positions; None: there are none.
        alibi_slopes: one a head, for distances in the scores; None: there are none.
        sliding_window: tokens seen back, the current one included; None sees all.
        logits_soft_cap: scores s become cap × tanh(s / cap).
        clip_qkv: queries, keys and values are clamped to ± this, after their norms.
        sinks: each head has a learned score that no value goes with; it takes its part of the weights (gpt-oss).
        latent: keys and values are one latent a token; then the heads' sizes are stated there.
        value_head_dim: size of one value; None: that of a key. Other sizes are for the Transformers backend.
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
        """What a token keeps."""
        if self.latent is not None:
            return self.latent.cache
        return CacheSpec(self.num_kv_heads, self.head_dim, self.value_head_dim or self.head_dim, self.sliding_window)


@dataclass(frozen=True)
class MLPConfig:
    """A feed-forward block.

    Attributes:
        size: its inner size.
        act: the activation; one that is no name is a gated MLP's.
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
        moe: a mixture of experts in the MLP's place; it takes the MLP's activation.
    """

    attention: AttentionConfig
    mlp: MLPConfig
    moe: MoEConfig | None = None

    @property
    def cache(self) -> LayerCache:
        """What the layer keeps of the sequences it has seen."""
        return self.attention.cache

    @property
    def rope(self) -> RopeParameters | None:
        """Its rotary positions."""
        return self.attention.rope

    @property
    def sliding_window(self) -> int | None:
        """Tokens seen back; None sees all."""
        return self.attention.sliding_window


@dataclass(frozen=True)
class ResidualConfig:
    """How attention and MLP join the residual stream; drawn above.

    Attributes:
        norms: the norms that each layer has.
        multiplier: attention and MLP outputs are multiplied by it (Granite).
    """

    kind: Literal["sequential", "parallel", "post-norm"] = "sequential"
    norms: tuple[NormName, ...] = ("input_norm", "pre_mlp_norm")
    multiplier: float = 1.0


@dataclass(frozen=True)
class EmbeddingConfig:
    """From token numbers to vectors.

    Attributes:
        multiplier: vectors are multiplied by it.
        size: of one vector; None: the hidden size. Another is projected to the hidden size, and back before the head.
        norm: vectors are normalised (BLOOM).
        positions: rows of a learned table that is added; 0: there is none.
        position_offset: position 0 has this row (OPT: 2).
    """

    multiplier: float = 1.0
    size: int | None = None
    norm: bool = False
    positions: int = 0
    position_offset: int = 0


@dataclass(frozen=True)
class HeadConfig:
    """From vectors to logits.

    Attributes:
        bias: whether the product has one.
        multiplier: logits are multiplied by it.
        soft_cap: then logits l become cap × tanh(l / cap).
    """

    bias: bool = False
    multiplier: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """All parts of one decoder.

    Attributes:
        norm: every norm on the residual stream.
        final_norm: whether there is one after the last layer.
    """

    norm: NormConfig
    layers: tuple[LayerConfig, ...]
    residual: ResidualConfig = ResidualConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    head: HeadConfig = HeadConfig()
    final_norm: bool = True
