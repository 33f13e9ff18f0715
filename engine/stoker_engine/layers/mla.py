"""Multi-head latent attention (DeepSeek-V2, 2024), computed on the latents.

The cache holds a latent c and a rotated part r for each token, which give the keys and values of all heads:

    key of head h    k = [ W_UK,h c ; r ]
    value of head h  v = W_UV,h c

Recomputing them for every cached token would be expensive, so the matrices are applied to the queries and to the
attention result instead (absorption):

    score    q · k  =  [ W_UK,hᵀ q_nope ; q_rope ] · [ c ; r ]
    result   Σ p v  =  W_UV,h Σ p c

So attention is multi-query attention with one key [c ; r] and one value c for all heads, which any backend computes.

The heads are split across the ranks; the latents are replicated.

WeightTargets: ``q``, or ``q_a``, ``q_a_norm`` and ``q_b``; ``kv_a`` and ``kv_a_norm``; ``k_b`` [heads,
qk_nope_head_dim, latent] and ``v_b`` [heads, v_head_dim, latent]; ``o``.
"""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.architectures.mla_config import MLAConfig
from stoker_engine.attention.backend import AttentionPlan, AttentionShape, KVCache, fuses_kv
from stoker_engine.kernels.bundle import Activations, RowFormat
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.layers.linear_site import SiteForm
from stoker_engine.layers.norm import RMSNorm
from stoker_engine.layers.rotary import Rotation
from stoker_engine.quant.method import Matrix
from stoker_engine.quant.weight_target import Shard, WeightTarget


class LatentAttention(nn.Module):
    """Latent self-attention of one layer.

    Args:
        scale: factor of the attention scores.
        bias: whether the projections to the low-rank bottlenecks and the output projection have biases.
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        config: MLAConfig,
        hidden_size: int,
        num_heads: int,
        scale: float,
        eps: float,
        bias: bool,
        out_space: RowSpace = RowSpace.TOKENS,
    ) -> None:
        super().__init__()
        self.config, self._prefix = config, prefix
        self.backend = build.backend
        self._fusing = build.backend if fuses_kv(build.backend) else None
        self._heads = heads = build.heads(num_heads)
        cache = config.cache
        self.shape = AttentionShape(heads.size, 1, cache.head_dim, cache.value_head_dim, scale)
        hidden, latent, rank = Shard.whole(hidden_size), config.kv_lora_rank, config.q_lora_rank
        bottlenecks = {"kv_a": Shard.whole(cache.head_dim)}
        self.q_a_norm = None
        if rank is not None:
            bottlenecks = {"q_a": Shard.whole(rank), **bottlenecks}
            self.q_a_norm = RMSNorm(build, f"{prefix}.q_a_norm", rank, eps)
        self.bottlenecks = MergedLinear(build, prefix, hidden, bottlenecks, bias)
        self.kv_a_norm = RMSNorm(build, f"{prefix}.kv_a_norm", latent, eps)
        queries = {"q" if rank is None else "q_b": heads.times(config.qk_head_dim)}
        self.query = MergedLinear(build, prefix, hidden if rank is None else Shard.whole(rank), queries, False)
        self._absorb = self._per_head(build, "k_b", latent, config.qk_nope_head_dim)  # W_UKᵀ
        self._make_value = self._per_head(build, "v_b", config.v_head_dim, latent)  # W_UV
        self.absorb = build.extended(
            self._absorb.batched_linear(),
            {f"{prefix}.k_b": heads},
            Shard.whole(config.qk_nope_head_dim),
            form=SiteForm.ABSORBED_KEYS,
        )
        self.make_value = build.extended(
            self._make_value.batched_linear(),
            {f"{prefix}.v_b": heads},
            Shard.whole(latent),
            out_space,
            SiteForm.ABSORBED_VALUES,
        )
        self.out = MergedLinear(build, prefix, heads.times(config.v_head_dim), {"o": hidden}, bias, space=out_space)

    def _per_head(self, build: Build, name: str, outputs: int, inner: int) -> Matrix:
        method = build.linear([f"{self._prefix}.{name}.weight"])
        return method.create(outputs, inner, build.dtype, build.kernels, self._heads.size)

    def quantize_early(self) -> RowFormat | None:
        """See `Attention.quantize_early`."""
        format = self.bottlenecks.row_format
        return format if self.q_a_norm is not None or self.query.row_format == format else None

    def attend(self, x: Activations, rotation: Rotation | None, plan: AttentionPlan, cache: KVCache) -> torch.Tensor:
        """Store the latents and attend: [tokens, hidden] → [tokens, heads × latent]. See `quantize_early`."""
        assert rotation is not None, "a part of each head is rotated"
        rows = self.bottlenecks(x)
        if self._fusing is not None:
            q_weight = None if self.q_a_norm is None else self.q_a_norm.weight.data
            of_kv = self.kv_a_norm
            queried = self._fusing.mla_rope_and_cache(
                rows, q_weight, of_kv.weight.data, of_kv.eps, rotation, cache, plan
            )
            query = self._queries(x if self.q_a_norm is None else queried, rotation)
            return self._fusing.attend(self.shape, query, cache, plan)
        config = self.config
        queried, latent, key_rope = rows.split(
            [config.q_lora_rank or 0, config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        query = self._queries(x if self.q_a_norm is None else self.q_a_norm(queried), rotation)
        key = rotation.joined(self.kv_a_norm(latent).unsqueeze(1), key_rope.unsqueeze(1))
        return self.backend.forward(self.shape, query, key, None, cache, plan)

    def _queries(self, x: Activations, rotation: Rotation) -> torch.Tensor:
        """Return the queries with absorbed W_UK, [tokens, heads, latent + rope]."""
        query = self.query(x).unflatten(-1, (self.shape.num_heads, -1))
        nope, rope = query.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        return rotation.joined(self.absorb(nope), rope)

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """See `Attention.project`."""
        return self.out(self.make_value(attended.unflatten(-1, (self.shape.num_heads, -1))).flatten(1))

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        targets = self.kv_a_norm.weight_targets()
        if self.q_a_norm is not None:
            targets.update(self.q_a_norm.weight_targets())
        for linear in (self.bottlenecks, self.query, self.out):
            targets.update(linear.weight_targets())
        targets[f"{self._prefix}.k_b.weight"] = self._absorb.stack_target(self._heads).transpose(1, 2)
        targets[f"{self._prefix}.v_b.weight"] = self._make_value.stack_target(self._heads)
        return targets
