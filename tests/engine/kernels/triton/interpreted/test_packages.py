"""Arguments for external attention packages: stand-ins do in torch what their documentation says, and check
requirements.

flash-attn 2.8 (`flash_attn_interface.py`), flashinfer 0.7 (`prefill.py`),
tokenspeed-fa3 3.0 (`flash_attn_interface.py` and flash-attention's `hopper/flash_api.cpp`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stoker_engine.attention.backend import AttentionBackend
from stoker_engine.attention.fa3 import FA3Backend
from stoker_engine.attention.flash_attn import FlashAttnBackend
from stoker_engine.attention.flashinfer import FlashInferBackend

from ....attention.conftest import Sequences, run
from .test_attention import LENGTHS, SHAPES, whole


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    scale: float,
    window_left: int,
    soft_cap: float,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute one sequence's last queries, causal; only blocks that a query sees are read."""
    size, count, group = keys.shape[1], len(query), query.shape[1] // keys.shape[2]
    at, key_at = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    oldest = 0 if window_left < 0 else max(0, length - count - window_left) // size * size
    seen = blocks[oldest // size : -(-length // size)].long()
    key, value = (
        part[seen].flatten(0, 1)[: length - oldest].float().repeat_interleave(group, 1) for part in (keys, values)
    )
    distance = (key_at - at)[:, oldest:]
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * distance
    hidden = (distance > 0) | ((distance < -window_left) & (window_left >= 0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).to(query.dtype)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:  # fmt: skip
    starts, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    assert causal and k.shape[1] % 256 == 0 and k.stride(-1) == v.stride(-1) == q.stride(-1) == 1
    assert {each.dtype for each in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    assert (starts[0], starts[-1], int(cu_seqlens_k[0])) == (0, len(q), 0) and len(block_table) == len(lengths)
    assert max(lengths) == max_seqlen_k and int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert (window_size == (-1, -1)) or window_size[1] == 0
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    parts = zip(starts, starts[1:], lengths, block_table, strict=False)
    return torch.cat(
        [
            attend(q[begin:end], k, v, blocks, length, softmax_scale, window_size[0], softcap, alibi_slopes)
            for begin, end, length, blocks in parts
        ]
    )


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, page_table: Any, cu_seqlens_q: Any, max_seqlen_q: int,
    softmax_scale: float, causal: bool, window_size: Any,
) -> torch.Tensor:  # fmt: skip
    starts, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    assert causal and k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == page_table.stride(-1) == 1
    assert q.dtype == k_cache.dtype == v_cache.dtype and q.shape[1] % k_cache.shape[2] == 0
    assert {each.dtype for each in (cu_seqlens_q, cache_seqlens, page_table)} == {torch.int32}
    assert cu_seqlens_q.is_contiguous() and cache_seqlens.is_contiguous()
    assert (starts[0], starts[-1]) == (0, len(q)) and len(page_table) == len(lengths) == len(starts) - 1
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and max(lengths) <= page_table.shape[1] * k_cache.shape[1]
    assert (window_size == (-1, -1)) or window_size[1] == 0
    parts = zip(starts, starts[1:], lengths, page_table, strict=False)
    return torch.cat(
        [
            attend(q[begin:end], k_cache, v_cache, blocks, length, softmax_scale, window_size[0], 0.0)
            for begin, end, length, blocks in parts
        ]
    )


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.numel() == 128 << 20 and kv_layout == "NHD"
        self.plans = 0

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        window_left: int, logits_soft_cap: float | None, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        plan_args = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {each.dtype for each in plan_args} == {torch.int32} and causal
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert all(1 <= last <= page_size for last in paged_kv_last_page_len.tolist())
        self.plan_args, self.page_size, self.shape = plan_args, page_size, (num_qo_heads, num_kv_heads, head_dim_qk)
        self.options = sm_scale, window_left, logits_soft_cap or 0.0
        self.plans += 1

    def run(self, q: Any, paged_kv_cache: Any) -> torch.Tensor:
        starts, pages, indices, last = self.plan_args
        k, v = paged_kv_cache
        assert q.is_contiguous() and (q.shape[1], k.shape[2], q.shape[2]) == self.shape and k.shape[1] == self.page_size
        assert k.stride() == v.stride()
        done = []
        for s, last_len in enumerate(last.tolist()):
            blocks = indices[pages[s] : pages[s + 1]]
            length = (len(blocks) - 1) * self.page_size + last_len
            done.append(attend(q[starts[s] : starts[s + 1]], k, v, blocks, length, *self.options))
        return torch.cat(done)


def check(backend: AttentionBackend, name: str, lengths: list[int], block_size: int, dtype: torch.dtype) -> None:
    sequences = Sequences.random(SHAPES[name], lengths, dtype, block_size=block_size)
    first = [length // 2 for length in lengths]
    started = sorted(((s, 0, end) for s, end in enumerate(first) if end), key=lambda span: span[2] > 1)
    later = [(s, begin, end) for s, (begin, end) in enumerate(zip(first, lengths, strict=True))]
    exact = 4e-6 if dtype == torch.float32 else 1e-2
    for index, rows in enumerate(
        run(backend, sequences, started, sorted(later, key=lambda span: span[2] - span[1] > 1))
    ):
        torch.testing.assert_close(rows.double(), sequences.expected(index), rtol=exact, atol=exact)


@pytest.mark.parametrize("name", ["plain", "seven to one", "window", "soft cap", "alibi"])
def test_flash_attn_equals_the_reference(name: str) -> None:
    check(FlashAttnBackend(flash_attn_varlen_func), name, [1, 2, 257, 5], 256, torch.float32)


@pytest.mark.parametrize("name", ["plain", "seven to one", "window"])
@pytest.mark.parametrize("block_size", [3, 16])
def test_fa3_equals_the_reference(name: str, block_size: int) -> None:
    check(FA3Backend(flash_attn_with_kvcache), name, LENGTHS, block_size, torch.bfloat16)


@pytest.mark.parametrize("name", ["plain", "seven to one", "window", "soft cap"])
def test_flashinfer_equals_the_reference(name: str) -> None:
    check(FlashInferBackend(BatchPrefillWithPagedKVCacheWrapper), name, LENGTHS, 16, torch.bfloat16)


def test_flashinfer_plans_a_step_once_for_each_kind_of_layer() -> None:
    wrappers: list[BatchPrefillWithPagedKVCacheWrapper] = []

    def wrapper(*words: Any) -> BatchPrefillWithPagedKVCacheWrapper:
        wrappers.append(BatchPrefillWithPagedKVCacheWrapper(*words))
        return wrappers[-1]

    backend = FlashInferBackend(wrapper)
    sequences = Sequences.random(SHAPES["plain"], [1, 20], torch.float32)
    for number in (1, 2):
        query, key, value, metadata = sequences.step(whole(sequences))
        plan = backend.prepare(metadata)
        for scale in (0.25, 0.5, 0.25):
            shape = dataclasses.replace(sequences.shape, scale=scale)
            backend.forward(shape, query, key, value, sequences.cache, plan)
        assert [each.plans for each in wrappers] == [number] * 2
