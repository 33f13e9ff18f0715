"""Self-attention with grouped key and value heads (GQA), and the options that model families add to it."""

from __future__ import annotations

import functools

import torch
from torch import nn

from stoker_engine.architectures.decoder_config import AttentionConfig, QKNormConfig
from stoker_engine.attention.backend import AttentionPlan, AttentionShape, HeadNorm, KVCache, fuses_kv
from stoker_engine.kernels.bundle import Activations, RowFormat
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.layers.norm import Norm, RMSNorm, make_norm
from stoker_engine.layers.rotary import Rotation
from stoker_engine.quant.weight_target import Shard, WeightTarget


class Attention(nn.Module):
    """Self-attention of one layer.

    The heads are split across the ranks. Key and value heads are replicated if there are fewer than ranks.

    WeightTargets: ``prefix.q``, ``k``, ``v``, ``o``, ``q_norm`` and ``k_norm``; ``prefix.sinks`` [heads], float32.

    Args:
        out_space: row space of the argument of `project`.

    Raises:
        ModelError: the heads cannot be split across the ranks.
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        config: AttentionConfig,
        hidden_size: int,
        out_space: RowSpace = RowSpace.TOKENS,
    ) -> None:
        super().__init__()
        self.backend, self._ranks, self._prefix = build.backend, build.ranks, prefix
        self._query_heads, self._kv_heads = build.heads(config.num_heads), build.kv_heads(config.num_kv_heads)
        slopes = config.alibi_slopes
        self.sinks: nn.Parameter | None = None
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(self._query_heads.size, dtype=torch.float32), requires_grad=False)
        self.shape = AttentionShape(
            num_heads=self._query_heads.size,
            num_kv_heads=self._kv_heads.size,
            head_dim=config.head_dim,
            value_head_dim=config.head_dim,
            scale=config.scale,
            sliding_window=config.sliding_window,
            logits_soft_cap=config.logits_soft_cap,
            alibi_slopes=None if slopes is None else torch.tensor(slopes[self._query_heads.positions]),
            sinks=None if self.sinks is None else self.sinks.data,
        )
        hidden = Shard.whole(hidden_size)
        width, kv_width = self._query_heads.times(config.head_dim), self._kv_heads.times(config.head_dim)
        self.qkv = MergedLinear(build, prefix, hidden, {"q": width, "k": kv_width, "v": kv_width}, config.qkv_bias)
        self.out = MergedLinear(build, prefix, width, {"o": hidden}, config.out_bias, space=out_space)
        self.clip_qkv = config.clip_qkv
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            self.full_norm = config.qk_norm.over == "full"
            self.q_norm = _head_norm(build, f"{prefix}.q_norm", config.qk_norm, self._query_heads, config.head_dim)
            self.k_norm = _head_norm(build, f"{prefix}.k_norm", config.qk_norm, self._kv_heads, config.head_dim)
        self._fusing = build.backend if fuses_kv(build.backend) and self.can_be_fused() else None

    def can_be_fused(self) -> bool:
        """Whether there is no operation between the QKV projection and RoPE except an RMS norm of each head."""
        is_plain = self.q_norm is None or (isinstance(self.q_norm, RMSNorm) and not self.full_norm)
        return is_plain and self.clip_qkv is None

    @functools.cached_property
    def head_norm(self) -> HeadNorm | None:
        """RMS norm of each query and key head; None if there is none. Only valid if `can_be_fused`."""
        if not isinstance(self.q_norm, RMSNorm) or not isinstance(self.k_norm, RMSNorm):
            return None
        return HeadNorm(self.q_norm.weight.data, self.k_norm.weight.data, self.q_norm.eps)

    def quantize_early(self) -> RowFormat | None:
        """Return the format of the `QuantizedRows` that `attend` also takes; None if it takes none. Call this after the
        weights are prepacked."""
        return self.qkv.row_format

    def attend(self, x: Activations, rotation: Rotation | None, plan: AttentionPlan, cache: KVCache) -> torch.Tensor:
        """Project to queries, keys and values, store keys and values, and attend.

        Args:
            x: [tokens, hidden]; see `quantize_early`.

        Returns:
            [tokens, heads × head_dim].
        """
        qkv = self.qkv(x)
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        qkv = qkv.view(-1, heads + 2 * kv_heads, self.shape.head_dim)
        if self._fusing is not None:
            return self._fusing.forward_qkv(self.shape, qkv, self.head_norm, rotation, cache, plan)
        value = qkv[:, heads + kv_heads :]
        rotated = qkv[:, : heads + kv_heads]  # queries and keys: the next operations apply to both
        if self.q_norm is not None and self.k_norm is not None:
            rotated = self._normalised(rotated, self.q_norm, self.k_norm)
        if self.clip_qkv is not None:
            rotated, value = (part.clamp(-self.clip_qkv, self.clip_qkv) for part in (rotated, value))
        if rotation is not None:
            rotated = rotation(rotated)
        return self.backend.forward(self.shape, rotated[:, :heads], rotated[:, heads:], value, cache, plan)

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """Apply the output projection to rows of `attend`'s result: [rows, heads × head_dim] → [rows, hidden]."""
        return self.out(attended)

    def _normalised(self, rotated: torch.Tensor, q_norm: Norm, k_norm: Norm) -> torch.Tensor:
        heads, size = self.shape.num_heads, self.shape.head_dim
        query, key = rotated[:, :heads], rotated[:, heads:]
        if self.full_norm:
            normed = self._all_heads(q_norm, query, self._query_heads), self._all_heads(k_norm, key, self._kv_heads)
            return torch.cat(normed, dim=-1).view(len(rotated), -1, size)
        return torch.cat((q_norm(query), k_norm(key)), dim=1)

    def _all_heads(self, norm: Norm, x: torch.Tensor, heads: Shard) -> torch.Tensor:
        """Normalise this rank's heads `x` by a norm over the heads of all ranks: [tokens, heads, d] →
        [tokens, heads × d]."""
        if heads.is_whole:
            return norm(x.flatten(1))
        size = x.shape[-1]
        every = self._ranks.all_gather(x.flatten(1)).unflatten(1, (-1, size))
        every = every[:, :: every.shape[1] // heads.full]  # drop replicas of key heads
        return norm(every.flatten(1))[:, heads.times(size).positions]

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        targets = {**self.qkv.weight_targets(), **self.out.weight_targets()}
        if self.q_norm is not None and self.k_norm is not None:
            targets.update({**self.q_norm.weight_targets(), **self.k_norm.weight_targets()})
        if self.sinks is not None:
            targets[f"{self._prefix}.sinks"] = WeightTarget.of(self.sinks.data, self._query_heads)
        return targets


def _head_norm(build: Build, prefix: str, config: QKNormConfig, heads: Shard, head_dim: int) -> Norm:
    if config.over == "full":
        return make_norm(build, prefix, config.norm, heads.full * head_dim)
    return make_norm(build, prefix, config.norm, head_dim, heads if config.over == "each" else None)
