"""The plan refuses a config.json with the same message as the engine at its start, for all families, and options that
some of them lack.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from stoker_common.errors import ModelError
from stoker_engine.architectures.activation import ACTIVATIONS
from stoker_engine.architectures.compute_dtype import compute_dtype, why_not_computed
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.activation import activation
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_operator.api.manifest import parse
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import study

from .conftest import document

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "torch_dtype": "bfloat16", "head_dim": 16,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "rotary_dim": 8,
}  # fmt: skip
#: Options that at least one family refuses or uses.
OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"hidden_act": "silu"},
    {"hidden_act": "xielu"},
    {"activation_function": "geglu"},
    {"rope_scaling": {"rope_type": "su", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
    {"layer_types": ["chunked_attention"] * 2},
    {"layer_types": ["full_attention"]},
    {"num_attention_heads": 6, "num_key_value_heads": 4},
    {"num_attention_heads": 10**9},
    {"norm_topk_prob": True},
    {"scoring_func": "tanh"},
    {"topk_method": "none"},
    {"moe_layer_freq": 2},
    {"mlp_bias": True},
    {"no_bias": False},
    {"add_cross_attention": True},
    {"scale_attn_weights": False},
    {"apply_residual_connection_post_layernorm": True},
    {"num_experts_per_tok": 9},
    {"num_key_value_heads": None, "hidden_size": 2, "head_dim": None},
    {"torch_dtype": "int8"},
    {"torch_dtype": "float64"},
    {"eos_token_id": -1},
    {"vocab_size": "many"},
)


def start(config: dict[str, Any]) -> str:
    """Return the engine's error while it reads the config and builds the model; empty if there is none."""
    try:
        read = ModelConfig.from_dict(config)
        if why := why_not_computed(compute_dtype(None, read.dtype, quantized=False, on_cpu=True)):
            return why.partition("; ")[0]  # the remedy is a flag there, and a field here
        with torch.device("meta"):
            Decoder(read, Build(torch.float32, SdpaBackend(), REFERENCE), 64)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_plan_refuses_exactly_the_configs_that_the_start_refuses(architecture: str) -> None:
    spec = parse(document("hf://org/m", "cpu", runtime="stoker", image="mine:1")).spec
    served = 0
    for option in OPTIONS:
        config = {"architectures": [architecture], **SIZES, **option}
        start_error = start(config)
        served += not start_error
        messages = [each.message for each in study(spec, Catalogue.load(), config).unplannable]
        assert messages == ([start_error] if start_error else []), (option, start_error)
    assert 5 < served < len(OPTIONS)


def test_remedy_names_another_runtime_only_if_it_knows_the_shape() -> None:
    spec = parse(document("hf://org/m", "nvidia-h100-80gb", 1, runtime="stoker", image="mine:1")).spec

    def remedy(**option: Any) -> str:
        config = {"architectures": ["LlamaForCausalLM"], **SIZES, **option}
        (violation,) = study(spec, Catalogue.load(), config).unplannable
        return violation.remedy

    assert remedy(hidden_act="xielu") == "use runtime: vllm"
    assert remedy(num_attention_heads=6, num_key_value_heads=4, head_dim=None) == "use another model"
    assert remedy(torch_dtype="int8") == "use bfloat16 or float16 or float32"


def test_activations_of_the_plan_are_those_of_the_kernels() -> None:
    for name in ACTIVATIONS:
        activation(name)
    with pytest.raises(ModelError, match="silu"):
        activation("xielu")
