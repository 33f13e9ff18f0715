"""Attention of one layer: prompts compared with torch's attention, decodes with the bandwidth.

Attention of installed packages is a part of its own, because some packages compile for longer than all other parts run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts.context import Context
from gpu_parts.figures import Figure
from gpu_parts.paged import paged_attention
from gpu_parts.scale import Attention
from gpu_parts.timing import median_ms


def measure(context: Context) -> None:
    """Record the figures."""
    scale, device, shape = context.scale, context.device, context.scale.attention
    settings = f"{shape.heads} query heads, {shape.kv_heads} KV heads of {shape.head_dim}, bf16"
    for block_size in scale.blocks:
        for sequences, length in scale.decodes:
            run = paged_attention(shape, [1] * sequences, [length] * sequences, block_size, device)
            title = f"decode attention, {sequences} × {length:,}, blocks of {block_size}"
            key = f"attention/decode/{sequences}x{length}/{block_size}"
            read = 4.0 * sequences * length * shape.kv_heads * shape.head_dim
            context.add(Figure(key, title, median_ms(run, device), "ms", settings, read))
        for length in scale.prefills if block_size == scale.blocks[0] else scale.prefills[1:2]:
            took = median_ms(paged_attention(shape, [length], [length], block_size, device), device)
            flops = 2.0 * shape.heads * length * length * shape.head_dim  # the causal mask halves the scores
            peers = _torch_peers(shape, length, device) if block_size == scale.blocks[0] else {}
            title = f"prefill attention, {length:,} tokens, blocks of {block_size}"
            key = f"attention/prefill/{length}/{block_size}"
            context.add(Figure(key, title, took, "ms", settings, least_flops=flops, peers=peers))


def measure_packages(context: Context) -> None:
    """Record the attention of installed packages, on keys and values that are not paged."""
    shape, device = context.scale.attention, context.device
    for length in context.scale.prefills:
        flops = 2.0 * shape.heads * length * length * shape.head_dim
        for name, run in _packages(*_inputs(shape, length, device)):
            took = _time(name, run, device)
            if took is not None:
                key, title = f"attention/prefill/{length}/{name}", f"prefill attention, {length:,} tokens, by {name}"
                context.add(Figure(key, title, took, "ms", "not paged", least_flops=flops))


def _torch_peers(shape: Attention, length: int, device: torch.device) -> dict[str, float]:
    """Return the time of torch's attention by each library that runs here, in ms."""
    inputs = [each.transpose(0, 1).unsqueeze(0).contiguous() for each in _inputs(shape, length, device)]
    runs: dict[str, Callable[[], object]] = {"torch": lambda: _sdpa(inputs)}
    if device.type == "cuda":
        runs["torch with cuDNN"] = lambda: _sdpa_by(SDPBackend.CUDNN_ATTENTION, inputs)
        runs["torch with flash"] = lambda: _sdpa_by(SDPBackend.FLASH_ATTENTION, inputs)
    times = {name: _time(name, run, device) for name, run in runs.items()}
    return {name: took for name, took in times.items() if took is not None}


def _time(name: str, run: Callable[[], object], device: torch.device) -> float | None:
    """Return the time of a run in ms; None, and the cause in the log, if it does not support the device."""
    try:
        return median_ms(run, device)
    except (RuntimeError, TypeError) as error:
        print(f"{name} does not run here: {str(error).partition(chr(10))[0]}")
        return None


def _inputs(shape: Attention, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries, keys and values [length, heads, head_dim]."""

    def random(heads: int) -> torch.Tensor:
        return torch.randn(length, heads, shape.head_dim, dtype=torch.bfloat16, device=device)

    return random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)


def _sdpa(inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _sdpa_by(choice: SDPBackend, inputs: list[torch.Tensor]) -> torch.Tensor:
    with sdpa_kernel(choice):
        return _sdpa(inputs)


def _packages(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the attention of installed packages."""
    batched = [each.unsqueeze(0) for each in (query, key, value)]
    modules = (("FA3", "flash_attn_interface"), ("FA3 (fa3-fwd)", "fa3_fwd_interface"), ("FA2", "flash_attn"))
    for name, module in modules:
        if importlib.util.find_spec(module) is not None:
            package: Any = importlib.import_module(module)
            yield name, partial(package.flash_attn_func, *batched, causal=True)
    if importlib.util.find_spec("flashinfer") is not None:
        flashinfer: Any = importlib.import_module("flashinfer")
        yield "FlashInfer", partial(flashinfer.single_prefill_with_kv_cache, query, key, value, causal=True)
