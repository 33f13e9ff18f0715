"""What a step holds beside weights and cache: a layer's activations, then the logits and what is made of them.

On a GPU, sums are those of the kernels there, of the layer that takes most; they are traced in the tests. Elsewhere
other kernels run, and operators of torch's between them (on a CPU, in other runtimes, and in models that transformers'
own modules compute): there the sums are meant to be more than these take.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.weight_sizes import ONE_DEVICE, Sharding

#: float32 copies that the sampler makes of the rows of logits it works on, where top-p has to sort whole rows.
SAMPLER_COPIES: Final = 11

#: Logits that it works on at once however few sequences there are: fewer are not worth a call.
SAMPLER_LOGITS: Final = 2**20

#: Rows that it starts at a multiple of: what such a part begins with lies at a multiple of 16 bytes whatever the
#: vocabulary, and kernels are compiled for what lies there.
_ROWS_TOGETHER: Final = 4

#: Vectors of the hidden size that each token has while a layer's widest part is computed, in the same way where
#: attention and MLP stand beside each other, between the two parts, where devices have little of either, and while
#: tokens are drawn.
_VECTORS: Final = 5
_VECTORS_IF_PARALLEL: Final = 7
_VECTORS_BETWEEN: Final = 7
_VECTORS_AT_LAST: Final = 3

#: Of 100, what is added for sizes that an allocator rounds up.
_ROUNDED: Final = 5


def activation_bytes(
    config: ModelConfig,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    element_bytes: int,
    split: Sharding = ONE_DEVICE,
    fused: bool = False,
) -> int:
    """The most that a step holds on one device.

    A step has at most `max_num_batched_tokens` tokens and samples at most one row a sequence.

    Args:
        element_bytes: of one activation.
        split: over how many devices an engine is spread.
        fused: whether our kernels of GPUs compute it.
    """
    logits = sampling_bytes(config.vocab_size, min(max_num_seqs, max_num_batched_tokens))
    token_bytes = max_num_batched_tokens * element_bytes
    if not fused or config.num_weights is not None:
        return token_bytes * _numbers_of_operators(config, split.tensor) + logits
    widest = max(_layer_numbers(layer, config.hidden_size, split) for layer in config.layers)
    hidden = config.hidden_size
    vectors = _VECTORS_IF_PARALLEL if config.decoder.residual.kind == "parallel" else _VECTORS
    numbers = max(vectors * hidden + widest, _VECTORS_BETWEEN * hidden)
    layers = token_bytes * numbers * (100 + _ROUNDED) // 100
    return max(layers, token_bytes * _VECTORS_AT_LAST * hidden + logits)


def _layer_numbers(layer: LayerConfig, hidden: int, split: Sharding) -> int:
    """What a token has in the wider one of a layer's two parts, beside vectors of the hidden size."""
    attention, moe = layer.attention, layer.moe
    cos_sin = 0 if layer.rope is None else 3 * attention.head_dim
    if (latent := attention.latent) is not None:
        # Queries, queries in the latent's numbers, and results in them; and the bottlenecks, which are not shared.
        of_heads = attention.num_heads * (latent.qk_head_dim + latent.cache.head_dim + latent.kv_lora_rank)
        mixing = of_heads // split.tensor + 2 * (latent.q_lora_rank or 0) + latent.cache.head_dim
    else:
        mixing = _mixing_numbers(attention, split.tensor)
    if moe is None:
        size = layer.mlp.size // split.tensor
        results = 1 + layer.mlp.bias  # which is added to what all devices' parts are together
        return cos_sin + max(mixing, (2 + layer.mlp.gated) * size, size + results * hidden)
    chosen = moe.num_experts_per_tok
    experts = chosen * moe.intermediate_size // (1 if split.expert > 1 else split.tensor)
    routed = max(3 * experts, experts + (chosen + 1) * hidden)
    shared = 3 * moe.shared_intermediate_size // split.tensor + hidden
    return cos_sin + max(mixing, routed, shared)


def _mixing_numbers(attention: AttentionConfig, tensor: int) -> int:
    """What a token has of queries, keys, values and results. Operators of torch's come between where not each head has
    a norm of its own; and where all heads have one together, each device has those of all for a while."""
    norm = attention.qk_norm
    if (norm is None or norm.over == "head") and attention.clip_qkv is None:
        return (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim // tensor
    apart = (3 * attention.num_heads + 4 * attention.num_kv_heads) * attention.head_dim // tensor
    is_gathered = tensor > 1 and norm is not None and norm.over == "full"
    return apart + (2 * attention.num_heads * attention.head_dim if is_gathered else 0)


def _numbers_of_operators(config: ModelConfig, tensor: int) -> int:
    """What a token has in a layer. In a mixture every expert that a token goes to has a result of its own, before they
    are added up."""
    experts = max((layer.moe.num_experts_per_tok for layer in config.layers if layer.moe), default=0)
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return (4 + experts) * config.hidden_size + (2 * width + 3 * config.intermediate_size) // tensor


def sampler_rows(vocab_size: int, max_num_seqs: int) -> int:
    """Rows of logits that the sampler works on at once: its copies take no more than twice the whole batch's logits,
    unless these are few."""
    rows = max(2 * max_num_seqs // SAMPLER_COPIES, SAMPLER_LOGITS // vocab_size)
    return max(1, rows // _ROWS_TOGETHER) * _ROWS_TOGETHER


def sampling_bytes(vocab_size: int, rows: int) -> int:
    """The most that `rows` rows of logits take, with what the head and the sampler make beside them.

    Logits are float32, and the sampler copies some rows of them at a time.
    """
    return vocab_size * 4 * (rows + max(2 * rows, SAMPLER_COPIES * sampler_rows(vocab_size, rows)))
