"""Models that ranks can shard: the check in advance (`objection`) agrees with the layers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stoker_common.errors import ModelError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat, StoredFormat
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.loading.stored_weights import with_formats
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.quant.unquantized import UNQUANTIZED
from stoker_engine.sizing.sharding import (
    dealt,
    every_part_has_some,
    largest_part,
    objection,
    tensor_sizes,
)
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats
from stoker_engine.sizing.weight_sizes import matrices

FORMATS: list[StoredFormat] = [
    GGUF_FORMATS["Q8_0"],
    GGUF_FORMATS["Q4_K"],
    ON_LOAD["int4"],
    ON_LOAD["int8"],
    GroupFormat("uint4", 32, "float16", zero=True, in_order_of="groups"),
    GroupFormat("fp8_e4m3", 128, "float32"),
]


@dataclass
class SilentRank(SingleRank):
    """A rank that never communicates."""

    rank: int
    size: int


def drawn(dice: random.Random) -> dict[str, Any]:
    """Draw a config with typical and with unusual sizes."""
    heads = dice.choice([1, 2, 3, 4, 6, 8, 12])
    config: dict[str, Any] = {
        "vocab_size": dice.choice([5, 7, 97, 128]),
        "hidden_size": 64,
        "intermediate_size": dice.choice([3, 5, 7, 32, 96, 101, 128, 257, 768, 1024]),
        "num_hidden_layers": dice.choice([1, 2]),
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([each for each in range(1, heads + 1) if heads % each == 0]),
        "head_dim": dice.choice([8, 20, 32, 64, 128]),
        "max_position_embeddings": 64,
    }
    kind = dice.choice(["LlamaForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", "MixtralForCausalLM"])
    if kind == "Qwen2MoeForCausalLM":
        config |= {"num_experts": dice.choice([2, 5, 8]), "num_experts_per_tok": 2, "decoder_sparse_step": 1}
        config |= {"moe_intermediate_size": dice.choice([3, 25, 32, 96, 256])}
        config |= {"shared_expert_intermediate_size": dice.choice([5, 41, 64, 256])}
    if kind == "MixtralForCausalLM":
        config |= {"num_local_experts": dice.choice([2, 3, 8]), "num_experts_per_tok": 2}
    if kind == "DeepseekV3ForCausalLM":
        config |= {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 32}
        config |= {"v_head_dim": dice.choice([8, 32, 128]), "n_routed_experts": 8, "num_experts_per_tok": 2}
        config |= {"moe_intermediate_size": dice.choice([6, 32, 96]), "n_group": 4, "topk_group": 2}
        config |= {"n_shared_experts": 1, "first_k_dense_replace": dice.choice([0, 1])}
        config |= {"num_key_value_heads": heads}
    return {"architectures": [kind], **config}


def stored(config: ModelConfig, dice: random.Random) -> WeightFormats:
    """Return formats with some kinds of matrices in blocks, equal for all experts."""
    if dice.random() < 0.4:
        return ALL_NUMBERS
    kinds = ("q", "k", "v", "o", "gate", "up", "down", "experts.down", "shared.down", "experts.gate", "experts.up")
    chosen = {kind: dice.choice(FORMATS) for kind in kinds if dice.random() < 0.5}
    formats: dict[str, StoredFormat | None] = {}
    for module, matrix in matrices(config):
        each = chosen.get(matrix.weight)
        # A file stores whole blocks.
        if isinstance(each, GroupFormat):
            each = each.for_rows(matrix.inner)
        if each is not None and matrix.inner % each.column_multiple == 0:
            formats[module] = each
    return WeightFormats.of(formats)


def refusal(config: ModelConfig, ranks: int, formats: WeightFormats, *, whole_experts: bool = False) -> str:
    """Return the error of any rank's layers; empty if there is none."""
    for rank in range(ranks):
        linear = with_formats(formats, lambda _: UNQUANTIZED)
        silent_rank = SilentRank(rank, ranks)
        build = Build(torch.float32, SdpaBackend(), REFERENCE, silent_rank, linear, whole_experts=whole_experts)
        try:
            with torch.device("meta"):
                Decoder(config, build, max_model_len=64)
        except ModelError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("seed", range(60))
def test_objection_agrees_with_the_layers(seed: int) -> None:
    dice = random.Random(seed)
    config = ModelConfig.from_dict(drawn(dice))
    formats = stored(config, dice)
    for ranks in (1, 2, 3, 4, 8):
        message, refused = objection(config, ranks, formats=formats), refusal(config, ranks, formats)
        assert bool(message) == bool(refused), (ranks, message, refused)
        assert (ranks in tensor_sizes(config, ranks, formats=formats)) == (message is None)
        if any(layer.moe for layer in config.layers):
            message = objection(config, ranks, whole_experts=True, formats=formats)
            refused = refusal(config, ranks, formats, whole_experts=True)
            assert bool(message) == bool(refused), (ranks, message, refused)


def test_random_cases_have_all_outcomes() -> None:
    """Otherwise the test above would compare little."""
    reasons: list[str] = []
    for seed in range(60):
        dice = random.Random(seed)
        config = ModelConfig.from_dict(drawn(dice))
        formats = stored(config, dice)
        found = [objection(config, ranks, formats=formats) for ranks in (2, 3, 4, 8)]
        reasons += ["" if each is None else each.reason for each in found]
        reasons += [word for each in found if each is not None for word in ("act order", "blocks") if word in each[1]]
    expected = {"", "HeadsNotDivisible", "KVHeadsNotDivisible", "ShardsNotDivisible", "ExpertsNotDivisible"}
    assert expected | {"act order", "blocks"} == set(reasons)
    assert reasons.count("") > 20


@pytest.mark.parametrize(
    ("change", "sizes", "reason", "message"),
    [
        ({}, {"tensor": 1, "pipeline": 3}, "TooFewLayers", "pipeline 3 is more than the model's 2 layers"),
        ({}, {"tensor": 2, "whole_experts": True}, "NotMixtureOfExperts", "not a mixture"),
        ({}, {"tensor": 3}, "HeadsNotDivisible", "tensor 3 does not divide the model's 8 attention heads"),
        ({"num_key_value_heads": 2, "num_attention_heads": 6}, {"tensor": 3}, "KVHeadsNotDivisible", "2 key-value"),
        ({"intermediate_size": 5}, {"tensor": 4}, "ShardsNotDivisible", "the MLP's inner size, 5, so some ranks"),
        ({"vocab_size": 5}, {"tensor": 4}, "ShardsNotDivisible", "the vocabulary, 5"),
    ],
)
def test_objection_names_the_reason_and_the_dimension(
    change: dict[str, int], sizes: dict[str, Any], reason: str, message: str
) -> None:
    plain = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    plain |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "max_position_embeddings": 64}
    config = ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"], **plain, **change})
    found = objection(config, **sizes)
    assert found is not None
    assert (found.reason, message in found.message) == (reason, True)


def test_whole_experts_require_one_for_each_rank() -> None:
    plain = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 2, "num_hidden_layers": 1}
    plain |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    config = ModelConfig.from_dict({"architectures": ["MixtralForCausalLM"], **plain, **experts})
    assert objection(config, 2, whole_experts=True) is None
    too_few = objection(config, 4, whole_experts=True)
    assert too_few is not None and too_few.reason == "ExpertsNotDivisible"
    uneven = {**experts, "num_local_experts": 5}
    config_of_five = ModelConfig.from_dict({"architectures": ["MixtralForCausalLM"], **plain, **uneven})
    assert objection(config_of_five, 4, whole_experts=True) is None
    split = objection(config, 4)
    assert split is not None and "each expert's inner size, 2" in split.message


@pytest.mark.parametrize("multiple", [1, 3, 32])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 5, 31, 32, 33, 96, 1000])
def test_parts_are_filled_front_to_back(size: int, parts: int, multiple: int) -> None:
    dealt, left = [], size
    for _ in range(parts):
        dealt.append(min(left, largest_part(size, parts, multiple)))
        left -= dealt[-1]
    assert left == 0 and dealt[0] == max(dealt)
    assert every_part_has_some(size, parts, multiple) == (min(dealt) > 0)


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (4, 3), (6, 4), (8, 3), (9, 8), (60, 7), (128, 48)])
def test_items_are_dealt_evenly(count: int, parts: int) -> None:
    ranges = [dealt(count, parts, part) for part in range(parts)]
    assert [item for mine in ranges for item in mine] == list(range(count))
    lengths = [len(mine) for mine in ranges]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
