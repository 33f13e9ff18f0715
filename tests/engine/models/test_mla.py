"""Latent attention with the paged latent cache, compared with transformers', which expands keys and values."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from stoker_engine.architectures.mla_config import MLAConfig
from stoker_engine.attention.backend import KVCache
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.layers.mla import LatentAttention
from stoker_engine.layers.rotary import Rotation

HIDDEN, HEADS, BLOCK, TOKENS = 48, 4, 8, 37


def _theirs(q_lora_rank: int | None, bias: bool) -> DeepseekV3Attention:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        attention_bias=bias,
        attn_implementation="eager",
    )
    attention = DeepseekV3Attention(config, 0).float().eval()
    for tensor in attention.state_dict().values():
        tensor.normal_(std=0.4)
    return attention


@pytest.mark.parametrize(("q_lora_rank", "bias"), [(16, False), (16, True), (None, False), (None, True)])
def test_latent_attention_equals_that_of_transformers(q_lora_rank: int | None, bias: bool) -> None:
    theirs = _theirs(q_lora_rank, bias)
    config = MLAConfig(q_lora_rank, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
    build = Build(torch.float32, SdpaBackend(), REFERENCE)
    ours = LatentAttention(build, "x", config, HIDDEN, HEADS, theirs.scaling, 1e-6, bias)
    targets = ours.weight_targets()
    for name, tensor in theirs.state_dict().items():
        part = name.replace("_proj_with_mqa", "").replace("_proj", "").replace("layernorm", "norm")
        if part == "kv_b.weight":
            key, value = tensor.unflatten(0, (HEADS, -1)).split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            targets.pop("x.k_b.weight").tensor.copy_(key)
            targets.pop("x.v_b.weight").tensor.copy_(value)
        else:
            targets.pop(f"x.{part}").tensor.copy_(tensor)
    assert not targets

    x = torch.randn(1, TOKENS, HIDDEN)
    positions = torch.arange(TOKENS)
    cos, sin = DeepseekV3RotaryEmbedding(theirs.config)(x, positions[None])
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    with torch.inference_mode():
        expected = theirs(x, (cos, sin), mask)[0][0]
        torch.testing.assert_close(_in_chunks(ours, x[0], [20, 1, 10, 1, 1, 4]), expected, atol=2e-5, rtol=1e-5)


def _in_chunks(attention: LatentAttention, x: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Compute one sequence with a shuffled paged cache, one chunk per step."""
    spec = attention.config.cache
    assert (spec.num_kv_heads, spec.latent) == (1, True)
    keys = torch.zeros(6, BLOCK, 1, spec.head_dim)
    cache = KVCache(keys, keys[..., : spec.value_head_dim], group=0)
    table = torch.tensor([[4, 1, 5, 2, 3]], dtype=torch.int32)
    out, start = [], 0
    for count in chunks:
        positions = torch.arange(start, start + count)
        slots = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
        starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, count], [start + count]))
        metadata = AttentionMetadata(
            query_starts=starts,
            seq_lens=lengths,
            num_decodes=int(count == 1),
            block_size=BLOCK,
            groups=[BlockTables(table, slots)],
            query_starts_host=starts.numpy(),
            seq_lens_host=lengths.numpy(),
        )
        rope = attention.config.qk_rope_head_dim
        frequencies = 10000.0 ** (-torch.arange(0, rope, 2) / rope)
        cos_sin = (positions[:, None] * frequencies).unsqueeze(1)
        rotate = Rotation(cos_sin.cos(), cos_sin.sin(), True, REFERENCE)
        attended = attention.attend(x[start : start + count], rotate, attention.backend.prepare(metadata), cache)
        out.append(attention.project(attended))
        start += count
    return torch.cat(out)
