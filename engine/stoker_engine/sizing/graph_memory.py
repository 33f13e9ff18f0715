"""Memory of the CUDA graphs of steps, an upper estimate that has not been fitted to any GPU.

    kernels        of each graph: the driver's record of each launch
    activations    of the largest step, once: graphs share a memory pool, since only one of them runs at a time
    inputs         fixed addresses that all graphs read; and the hidden states that they write
    sampling       its graphs: kernels, the logits of the largest one, and its inputs

The number of graphs, and the results of the parts into which attention splits keys, grow with the tokens that the KV
cache holds, and the cache gets the memory that graphs leave: `sizing.memory` finds the largest cache that has room
beside its graphs.

The engine logs the memory that a capture takes, and warns if it is more than planned.
"""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.decoder_config import AttentionConfig, LayerConfig
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.activations import layer_activation_bytes
from stoker_engine.sizing.part_sizes import PART_SIZES
from stoker_engine.sizing.step_shapes import captured_shapes, logits_row_bytes, planned_lengths, sampled_rows
from stoker_engine.sizing.weight_sizes import Sharding

#: Bytes of the driver's memory for each launch in a graph: an estimate from vLLM's logs. 35 graphs of a model of 16
#: layers took 0.21 GiB, with their activations (vLLM's pull request 11349), some 30 KiB a launch, and 67 graphs of 32
#: layers 0.3 GiB, some 20. CUDA 11.2 took 64 KiB (https://forums.developer.nvidia.com/t/244901).
_LAUNCH_BYTES: Final = 16 << 10

#: Values of ``--attention-backend`` whose steps can be captured; ``auto`` takes Triton's kernels on a GPU.
_CAPTURED_BACKENDS: Final = ("auto", "triton")

#: Launches of a layer: dense, with a mixture of experts, with latent attention; and in addition those of adapters, and
#: the sums over ranks.
_DENSE, _MIXTURE, _LATENT, _ADAPTERS, _SUMS = 12, 18, 24, 10, 2

#: Launches of a step outside its layers.
_STEP: Final = 24

#: Launches of sampling, at most, except that a packed head of more than 128 rows has two for each slab. Devices that
#: split the vocabulary have graphs without draws, others also graphs with draws.
SAMPLING_LAUNCHES: Final = 24

#: Bytes of workspaces that matrix multiplications keep in the pool.
_WORKSPACES: Final = 64 << 20


def are_captured(enforce_eager: bool, attention_backend: str) -> bool:
    """Return whether a GPU may run steps as CUDA graphs with these values of ``--enforce-eager`` and
    ``--attention-backend``."""
    return not enforce_eager and attention_backend in _CAPTURED_BACKENDS


def graph_bytes(
    config: ModelConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    cache_tokens: int,
    element_bytes: int,
    block_size: int,
    num_groups: int,
    split: Sharding,
    has_adapters: bool = False,
) -> int:
    """Return the bytes that the graphs of a device take. They grow with `max_model_len` and `cache_tokens`.

    Args:
        max_model_len: maximum tokens of a sequence.
        cache_tokens: tokens in all blocks of the KV cache.
        element_bytes: bytes of one element of activations.
        block_size: tokens in one block.
        num_groups: number of groups of layers, each with its own block tables.
        split: devices of the engine.
        has_adapters: whether steps with adapters have their own graphs.
    """
    shapes = captured_shapes(max_num_seqs, max_num_batched_tokens, has_adapters)
    lengths = [planned_lengths(shape, cache_tokens, max_model_len) for shape in shapes]
    sums = _SUMS * len(config.layers) if split.tensor > 1 else 0
    layers = (sum(map(layer_launches, config.layers)) + sums) // split.pipeline
    of_adapters = _ADAPTERS * len(config.layers) // split.pipeline
    launches = sum(
        len(of_shape) * (_STEP + layers + shape.has_adapters * of_adapters)
        for shape, of_shape in zip(shapes, lengths, strict=True)
    )
    tokens, sequences = max(shape.tokens for shape in shapes), max(shape.sequences for shape in shapes)
    parts = max(
        shape.sequences * PART_SIZES.num_parts(max(of_shape)) for shape, of_shape in zip(shapes, lengths, strict=True)
    )
    of_part = max(layer.attention.num_heads * (_result_dim(layer.attention) + 2) for layer in config.layers)
    activations = layer_activation_bytes(config, tokens, element_bytes, split) + parts * of_part // split.tensor * 4
    tables = num_groups * (sequences + 1) * -(-max_model_len // block_size) * 4
    hidden = tokens * config.hidden_size * element_bytes * (1 if split.pipeline == 1 else 2)  # received, and computed
    sampling = sampling_graph_bytes(config, max_num_seqs, max_num_batched_tokens, element_bytes, split)
    return launches * _LAUNCH_BYTES + activations + _WORKSPACES + tables + hidden + sampling


def sampling_graph_bytes(
    config: ModelConfig, max_num_seqs: int, max_num_batched_tokens: int, element_bytes: int, split: Sharding
) -> int:
    """Return the bytes that the graphs of sampling take; see `graph_bytes`. Only the last stage has them, but all
    stages have as many cache blocks, so all reserve the memory."""
    sizes = sampled_rows(config.vocab_size, min(max_num_seqs, max_num_batched_tokens), element_bytes)
    logits = sizes[-1] * logits_row_bytes(-(-config.vocab_size // split.tensor), element_bytes)
    kinds = 1 if split.tensor > 1 else 2
    return (
        kinds * len(sizes) * SAMPLING_LAUNCHES * _LAUNCH_BYTES + logits + sizes[-1] * config.hidden_size * element_bytes
    )


def _result_dim(attention: AttentionConfig) -> int:
    """Return the elements of a head's result in the attention kernels."""
    return attention.head_dim if attention.latent is None else attention.latent.kv_lora_rank


def layer_launches(layer: LayerConfig) -> int:
    """Return the maximum launches of a layer in a step with decodes and chunks, without adapters. Only layers of packed
    integers launch more, up to a quarter."""
    if layer.attention.latent is not None:
        return _LATENT
    return _DENSE if layer.moe is None else _MIXTURE
