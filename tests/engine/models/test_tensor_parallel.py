"""Ranks that share a model, each a thread with its shard of the weights, compared with the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker_common.errors import ModelError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.attention.select import attention_backend
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.select import select_kernels
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.loading.safetensors_folder import SafetensorsFolder
from stoker_engine.models.loading.weights import load_weights
from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.sizing.weight_sizes import Sharding, stage_weight_bytes, weight_bytes

from ...support.engine.served import served
from ...support.engine.tiny_models import random_model

_VOCABULARY = 131  # a prime

#: Heads that 2, 3 and 4 ranks can share, and an MLP that they share unequally.
_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 256,
}
_MIXTURE = {**_SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 25}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 25,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_GPT2 = {"n_embd": 96, "n_inner": 101, "n_layer": 2, "n_head": 12, "n_positions": 256}
_BLOOM = {"hidden_size": 96, "n_layer": 2, "n_head": 12}

#: By name: transformers' model type, and config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "llama biases, tied": ("llama", {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 6 KV heads": ("llama", {**_SIZES, "num_key_value_heads": 6}),
    "llama 4 KV heads": ("llama", {**_SIZES, "num_key_value_heads": 4}),
    "llama 1 KV head": ("llama", {**_SIZES, "num_key_value_heads": 1}),
    "gemma3": ("gemma3_text", {**_SIZES, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 20}),
    "olmo2": ("olmo2", {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}),
    "cohere": ("cohere", {**_SIZES, "use_qk_norm": True, "num_key_value_heads": 6}),
    "gpt2": ("gpt2", _GPT2),
    "bloom": ("bloom", _BLOOM),
    "opt": ("opt", {**_SIZES, "ffn_dim": 101, "word_embed_proj_dim": 40}),
    "phi": ("phi", {**_SIZES, "qk_layernorm": True}),
    "gpt_neox": ("gpt_neox", {**_SIZES, "use_parallel_residual": True}),
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 4, "sliding_window": 20}),
    "qwen2_moe": ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 41, "num_key_value_heads": 2}),
    "gpt_oss": ("gpt_oss", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "gpt_oss 2 KV heads": (
        "gpt_oss",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "num_key_value_heads": 2},
    ),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "q_lora_rank": 16, "n_shared_experts": 1}),
}

#: Every model with each number of ranks that can share its heads; and mixtures with whole experts per rank.
CASES = [
    (name, size, False)
    for name, (_, options) in MODELS.items()
    for size in (2, 3, 4)
    if (kv_heads := options.get("num_key_value_heads", 12)) % size == 0 or size % kv_heads == 0
] + [
    (name, size, True)
    for name, sizes in {
        "mixtral": (2, 3, 4),  # on three, 2, 1 and 1 experts
        "qwen2_moe": (2, 4),  # on four, 2, 2, 1 and 1
        "gpt_oss": (4,),
        "gpt_oss 2 KV heads": (2,),
        "deepseek_v2": (3,),  # 3, 3 and 2 experts
        "deepseek_v3": (4,),
    }.items()
    for size in sizes
]


def save(name: str, folder: Path) -> None:
    """Save the tiny random model with that name in `MODELS`."""
    model_type, options = MODELS[name]
    random_model(model_type, {"vocab_size": _VOCABULARY, **options}, std=0.2).save_pretrained(folder)


class Together:
    """Shared state of threads that act as ranks: a table, and a barrier before and after it is read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' `x`."""
        self.table[rank] = x.clone()
        self.barrier.wait()
        every = [each for each in self.table if each is not None]
        self.barrier.wait()
        return every


@dataclass
class ThreadRanks:
    """A `Communicator` of one thread."""

    rank: int
    size: int
    together: Together

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.together.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        return torch.cat(self.together.exchange(self.rank, x), dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self.together.exchange(self.rank, x)[0]


def load(folder: Path, ranks: Communicator, whole_experts: bool = False) -> Decoder:
    """Load one rank's shard of the model in `folder`."""
    config, cpu = ModelConfig.from_dict(read_config(folder)), torch.device("cpu")
    backend, kernels = attention_backend(cpu, served(torch.float32)), select_kernels(cpu, torch.float32)
    build = Build(torch.float32, backend, kernels, ranks, whole_experts=whole_experts)
    with torch.inference_mode():
        model = Decoder(config, build, max_model_len=256)
        load_weights(model, SafetensorsFolder(folder), FAMILIES[config.architecture].weight_names)
    return model


def on_every_rank(size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """Return what `work` returns on each rank."""
    together = Together(size)

    def guarded(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, size, together))
        except BaseException:
            together.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def part_of(model: Decoder, ranks: Communicator) -> Any:
    """Return `model` with a config of the caches of one rank, as a test's runner creates them, and all logits."""
    size = ranks.size
    layers = tuple(
        replace(layer, attention=replace(layer.attention, num_kv_heads=-(-layer.attention.num_kv_heads // size)))
        for layer in model.config.layers
    )
    config = SimpleNamespace(layers=layers)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return ranks.all_gather(model.logits(hidden).float())

    return SimpleNamespace(config=config, backend=model.backend, forward=model.forward, logits=logits)


@pytest.mark.parametrize(("name", "size", "whole_experts"), CASES)
def test_ranks_give_the_logits_of_the_whole_model(
    name: str, size: int, whole_experts: bool, tmp_path: Path, paged_run: Any, assert_run: Any
) -> None:
    save(name, tmp_path)
    whole = load(tmp_path, SingleRank())
    prompts = [[5, 130, 2, 77], list(range(2, 63)), [129]]

    def work(ranks: Communicator) -> tuple[Any, Decoder]:
        model = load(tmp_path, ranks, whole_experts)
        return paged_run(part_of(model, ranks), prompts, new_tokens=6), model

    ran = on_every_rank(size, work)

    def reference(tokens: list[int]) -> torch.Tensor:
        return torch.stack(paged_run(whole, [tokens], new_tokens=1).sequences[0].logits)

    assert_run(ran[0][0], reference)
    for run, _ in ran[1:]:  # the same bits on all ranks, so that they never diverge
        for first, other in zip(ran[0][0].sequences, run.sequences, strict=True):
            assert torch.equal(torch.stack(first.logits), torch.stack(other.logits))

    held = [sum(target.tensor.nbytes for target in model.weight_targets().values()) for _, model in ran]
    split = Sharding(size, expert=size if whole_experts else 1)
    assert held == [stage_weight_bytes(whole.config, 0, 4, split, rank=rank) for rank in range(size)]
    assert held[0] == max(held) == weight_bytes(whole.config, 4, sharding=split)


@pytest.mark.parametrize(("name", "size", "whole_experts"), CASES)
def test_shards_cover_the_whole_weights(name: str, size: int, whole_experts: bool, tmp_path: Path) -> None:
    """Each element of a weight is in some rank's target, at the position given by the shard."""
    save(name, tmp_path)
    parts = [
        load(tmp_path, ThreadRanks(rank, size, Together(size)), whole_experts).weight_targets() for rank in range(size)
    ]
    for param_name, expected in load(tmp_path, SingleRank()).weight_targets().items():
        joined = torch.full_like(expected.tensor, torch.nan)
        for part in (each[param_name] for each in parts):
            assert part.full_shape == expected.tensor.shape
            part.part_of(joined).copy_(part.tensor)
        assert torch.equal(joined, expected.tensor), param_name


@pytest.mark.parametrize(
    ("change", "size", "named"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, 3, "8 attention heads"),
        ({"num_key_value_heads": 2}, 3, "2 key and value heads"),
        ({"num_key_value_heads": 6}, 4, "6 key and value heads"),
        ({"intermediate_size": 5, "num_key_value_heads": 4}, 4, "a dimension of 5"),
    ],
)
def test_unshardable_models_are_refused(change: dict[str, int], size: int, named: str) -> None:
    config = ModelConfig.from_dict(
        {"architectures": ["LlamaForCausalLM"], **_SIZES, "vocab_size": _VOCABULARY, **change}
    )
    for rank in range(size):
        build = Build(torch.float32, SdpaBackend(), REFERENCE, ThreadRanks(rank, size, Together(size)))
        with pytest.raises(ModelError, match=rf"({named}).*--tensor-parallel-size"):
            Decoder(config, build, max_model_len=256)
