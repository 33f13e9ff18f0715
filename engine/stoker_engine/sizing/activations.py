"""Peak memory of a step in addition to weights and cache: the activations of a layer, or the logits and the sampler's
buffers.

For Stoker's GPU kernels the sums follow the largest layer, and tests compare them with measured peaks. On CPUs, in
other runtimes and on the Transformers backend the sums are upper estimates.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.weight_sizes import ONE_DEVICE, Sharding

#: Number of float32 copies that the sampler makes of the logits it processes at a time, when top-p sorts whole rows.
SAMPLER_COPIES: Final = 11

#: Minimum number of logits that the sampler processes at a time.
SAMPLER_LOGITS: Final = 2**20

#: The sampler's chunks begin at multiples of this many float32 rows, so they are 16-byte aligned for any vocabulary
#: size, as the kernels require.
_ROWS_TOGETHER: Final = 4

#: Live vectors of the hidden size for each token: during the widest part of a layer, the same with parallel attention
#: and MLP, between the two parts (which dominates if shards are small), and during sampling.
_VECTORS: Final = 5
_VECTORS_IF_PARALLEL: Final = 7
_VECTORS_BETWEEN: Final = 7
_VECTORS_AT_LAST: Final = 3

#: Percentage added because allocators round sizes up.
_ROUNDED: Final = 5


def activation_bytes(
    config: ModelConfig,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    element_bytes: int,
    split: Sharding = ONE_DEVICE,
    fused: bool = False,
    workspace: int = 0,
) -> int:
    """Return the peak bytes of a step's activations and logits on one device.

    Args:
        max_num_batched_tokens: maximum tokens in a step.
        max_num_seqs: maximum sequences in a step, each of which samples one row of logits.
        element_bytes: bytes of one element of activations.
        split: devices of the engine.
        fused: whether Stoker's GPU kernels compute the step.
        workspace: bytes that multiplications with the matrices of layers and the head need in addition
            (`packed_weights.workspace_bytes`).
    """
    logits = sampling_bytes(config.vocab_size, min(max_num_seqs, max_num_batched_tokens))
    token_bytes = max_num_batched_tokens * element_bytes
    if not fused or config.num_weights is not None:
        return token_bytes * _numbers_of_operators(config, split.tensor) + logits
    layers = layer_activation_bytes(config, max_num_batched_tokens, element_bytes, split)
    return max(layers, token_bytes * _VECTORS_AT_LAST * config.hidden_size + logits) + workspace


def layer_activation_bytes(config: ModelConfig, tokens: int, element_bytes: int, split: Sharding) -> int:
    """Return the peak bytes of a step's activations in the layers, computed by Stoker's GPU kernels; see
    `activation_bytes`."""
    widest = max(_layer_numbers(layer, config.hidden_size, split) for layer in config.layers)
    hidden = config.hidden_size
    vectors = _VECTORS_IF_PARALLEL if config.decoder.residual.kind == "parallel" else _VECTORS
    numbers = max(vectors * hidden + widest, _VECTORS_BETWEEN * hidden)
    return tokens * element_bytes * numbers * (100 + _ROUNDED) // 100


def _layer_numbers(layer: LayerConfig, hidden: int, split: Sharding) -> int:
    """Return the number of elements of one token in the larger part of a layer (attention or MLP), in addition to the
    vectors of the hidden size."""
    attention, moe = layer.attention, layer.moe
    cos_sin = 0 if layer.rope is None else 3 * attention.head_dim
    if (latent := attention.latent) is not None:
        # Per head: queries, and queries and results in the latent space. The low-rank bottlenecks are replicated.
        of_heads = attention.num_heads * (latent.qk_head_dim + latent.cache.head_dim + latent.kv_lora_rank)
        mixing = of_heads // split.tensor + 2 * (latent.q_lora_rank or 0) + latent.cache.head_dim
    else:
        mixing = _mixing_numbers(attention, split.tensor)
    if moe is None:
        size = layer.mlp.size // split.tensor
        results = 1 + layer.mlp.bias  # the bias is added after the all-reduce
        return cos_sin + max(mixing, (2 + layer.mlp.gated) * size, size + results * hidden)
    chosen = moe.num_experts_per_tok
    experts = chosen * moe.intermediate_size // (1 if split.expert > 1 else split.tensor)
    routed = max(3 * experts, experts + (chosen + 1) * hidden)
    shared = 3 * moe.shared_intermediate_size // split.tensor + hidden
    return cos_sin + max(mixing, routed, shared)


def _mixing_numbers(attention: AttentionConfig, tensor: int) -> int:
    """Return the elements of a token's queries, keys, values and results. If QKV is clipped, or queries and keys have
    another norm than one that all heads share, torch operators need extra copies. With a norm over all heads, each
    device temporarily gathers all heads."""
    norm = attention.qk_norm
    if (norm is None or norm.over == "head") and attention.clip_qkv is None:
        return (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim // tensor
    apart = (3 * attention.num_heads + 4 * attention.num_kv_heads) * attention.head_dim // tensor
    is_gathered = tensor > 1 and norm is not None and norm.over == "full"
    return apart + (2 * attention.num_heads * attention.head_dim if is_gathered else 0)


def _numbers_of_operators(config: ModelConfig, tensor: int) -> int:
    """Return the elements of a token in a layer computed by torch operators. In a mixture of experts, each selected
    expert has its own result before the results are added up."""
    experts = max((layer.moe.num_experts_per_tok for layer in config.layers if layer.moe), default=0)
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return (4 + experts) * config.hidden_size + (2 * width + 3 * config.intermediate_size) // tensor


def sampler_rows(vocab_size: int, max_num_seqs: int) -> int:
    """Return the number of rows of logits that the sampler processes at a time. Unless the batch is small, the
    sampler's copies take at most twice the memory of the batch's logits."""
    rows = max(2 * max_num_seqs // SAMPLER_COPIES, SAMPLER_LOGITS // vocab_size)
    return max(1, rows // _ROWS_TOGETHER) * _ROWS_TOGETHER


def sampling_bytes(vocab_size: int, rows: int) -> int:
    """Return the peak bytes of `rows` rows of float32 logits, including temporaries of the head and the sampler."""
    return vocab_size * 4 * (rows + max(2 * rows, SAMPLER_COPIES * sampler_rows(vocab_size, rows)))
