"""Memory arithmetic: the planner predicts by these sums and the runner allocates by them.

    budget  =  utilization × device memory
    KV      =  budget − weights − activations − runtime
    blocks  =  ⌊KV ÷ bytes of one block⌋

All results are bytes on one device. ``tensor`` is the tensor-parallel size.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.contract.model_config import ModelConfig

GIB: Final = 1024**3

#: An allowance for the interpreter, torch and its buffers; not measured yet, and meant to be more than they take.
RUNTIME_BYTES: Final = 1 * GIB

#: On CPU the memory is the machine's own and shared with other programs, so the cache stops here unless
#: ``--kv-cache-memory-bytes`` asks for more (vLLM's default on CPU).
CPU_KV_CACHE_LIMIT: Final = 4 * GIB


def weight_bytes(config: ModelConfig, element_bytes: int, tensor: int = 1) -> int:
    """Weights of one tensor-parallel shard. Norms are replicated, matrices and the vocabulary are split."""
    hidden, head = config.hidden_size, config.head_dim
    heads = config.num_attention_heads * head
    kv_heads = max(config.num_key_value_heads // tensor, 1) * tensor * head
    attention = hidden * (heads + 2 * kv_heads) + heads * hidden
    if config.attention_bias:
        attention += heads + 2 * kv_heads + hidden
    mlp = 3 * hidden * config.intermediate_size
    if config.mlp_bias:
        mlp += 2 * config.intermediate_size + hidden
    gemma = config.model_type == "gemma3_text"
    norms = (4 * hidden + 2 * head) if gemma else 2 * hidden
    vocabulary = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    matrices = config.num_hidden_layers * (attention + mlp) + vocabulary
    return (matrices // tensor + config.num_hidden_layers * norms + hidden) * element_bytes


def kv_block_bytes(config: ModelConfig, block_size: int, element_bytes: int, tensor: int = 1) -> int:
    """Keys and values of one block of `block_size` tokens, in all layers."""
    kv_heads = max(config.num_key_value_heads // tensor, 1)
    return config.num_hidden_layers * 2 * block_size * kv_heads * config.head_dim * element_bytes


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
