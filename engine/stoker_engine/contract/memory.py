"""Memory arithmetic: the planner predicts by these sums and the runner allocates by them.

    budget  =  utilization × device memory
    KV      =  budget − weights − activations − runtime
    blocks  =  ⌊KV ÷ bytes of one block⌋

All results are bytes on one device. ``tensor`` is the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from stoker_engine.contract.cache_groups import CacheGroup, cache_groups, numbers_per_slot
from stoker_engine.contract.model_config import ModelConfig
from stoker_engine.contract.weight_sizes import weight_bytes as weight_bytes

GIB: Final = 1024**3

#: An allowance for the interpreter, torch and its buffers; not measured yet, and meant to be more than they take.
RUNTIME_BYTES: Final = 1 * GIB

#: On CPU the memory is the machine's own and shared with other programs, so the cache stops here unless
#: ``--kv-cache-memory-bytes`` asks for more (vLLM's default on CPU).
CPU_KV_CACHE_LIMIT: Final = 4 * GIB


def model_cache_groups(config: ModelConfig, tensor: int = 1) -> tuple[CacheGroup, ...]:
    """The groups of layers that share block tables, on one device. KV heads are split, latent vectors replicated."""
    specs = [layer.cache for layer in config.layers]
    return cache_groups([s if s.latent else replace(s, num_kv_heads=max(s.num_kv_heads // tensor, 1)) for s in specs])


def kv_block_bytes(groups: Sequence[CacheGroup], block_size: int, element_bytes: int) -> int:
    """One block of the KV cache."""
    return numbers_per_slot(groups) * block_size * element_bytes


def activation_bytes(
    config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int, element_bytes: int, tensor: int = 1
) -> int:
    """The most a step holds beside weights and cache: one layer's activations, and the sampler's logits.

    A step has at most `max_num_batched_tokens` tokens and samples at most one token a sequence. The sampler
    holds logits, their sorted copy and probabilities in float32.
    """
    rows = min(max_num_seqs, max_num_batched_tokens)
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = max_num_batched_tokens * (4 * config.hidden_size + (2 * width + 3 * config.intermediate_size) // tensor)
    return layer * element_bytes + 3 * rows * config.vocab_size * 4


def kv_cache_bytes(memory_bytes: int, utilization: float, weights: int, activations: int, *, on_cpu: bool) -> int:
    """What is left for the KV cache; zero or below when the model does not fit."""
    left = int(memory_bytes * utilization) - weights - activations - RUNTIME_BYTES
    return min(left, CPU_KV_CACHE_LIMIT) if on_cpu else left
