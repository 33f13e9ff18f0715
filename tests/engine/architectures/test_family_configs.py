"""config.json of every family, in the hub's older spelling, in transformers 5's, and with all fields left out.

transformers is the reference: its config classes read the old spelling, write the new one, and know the defaults.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from stoker_common.errors import ModelError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig

from .hub_configs import HUB

#: Families with remote code only: transformers has no config class for them.
REMOTE = {"qwen", "internlm2", "internlm3"}


def _without_names(config: ModelConfig) -> ModelConfig:
    return replace(config, architecture="", dtype="")


@pytest.mark.parametrize("name", HUB)
def test_hub_spelling_is_read_as_by_transformers(name: str) -> None:
    architecture, hub = HUB[name]
    given = {key: value for key, value in hub.items() if key not in ("model_type", "torch_dtype")}
    written = CONFIG_MAPPING[hub["model_type"]](**given).to_dict()
    ours = ModelConfig.from_dict({"architectures": [architecture], **hub})
    theirs = ModelConfig.from_dict({**written, "architectures": [architecture]})
    assert _without_names(ours) == _without_names(theirs)
    assert ours.dtype == hub.get("torch_dtype", "float32")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_defaults_equal_those_of_transformers(architecture: str) -> None:
    family = FAMILIES[architecture]
    if family.model_type in REMOTE:
        pytest.skip("transformers has no config class for it")
    written = CONFIG_MAPPING[family.model_type]().to_dict()
    ours = ModelConfig.from_dict({"architectures": [architecture]})
    theirs = ModelConfig.from_dict({**written, "architectures": [architecture]})
    assert _without_names(ours) == _without_names(theirs)


def test_every_dense_family_has_a_hub_config() -> None:
    spelled = {FAMILIES[architecture].model_type for architecture, _ in HUB.values()}
    dense = {ModelConfig.from_dict({"architectures": [name]}).model_type for name in FAMILIES if _is_dense(name)}
    assert dense - spelled - REMOTE == set()


def test_the_documentation_names_every_architecture() -> None:
    table = (Path(__file__).parents[3] / "docs" / "guides" / "models.md").read_text().split("Any other decoder")[0]
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration))`", table)) == set(FAMILIES)


def _is_dense(architecture: str) -> bool:
    layers = ModelConfig.from_dict({"architectures": [architecture]}).layers
    return all(layer.moe is None and layer.attention.latent is None for layer in layers)


def test_phi_3_longrope_is_read_by_its_older_names() -> None:
    architecture, hub = HUB["Phi-3-mini-128k"]

    def read(rope_type: str) -> ModelConfig:
        scaling = {**hub["rope_scaling"], "type": rope_type}
        return ModelConfig.from_dict({"architectures": [architecture], **hub, "rope_scaling": scaling})

    assert read("su") == read("yarn") == read("longrope")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "encoder"),
        ({"architectures": ["BertModel"]}, "not an autoregressive decoder"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "classifier"),
        ({"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True}, "encoder"),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 4}, "multiple"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": "large"}, "hidden_size must be a number"),
        ({"architectures": ["MptForCausalLM"], "attn_config": {"alibi": False}}, "alibi"),
        ({"architectures": ["MptForCausalLM"], "no_bias": False}, "no_bias"),
        ({"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ({"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True}, "add_cross_attention"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types names 1"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 32}, "linear_attention"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor must be a list of 48",
        ),
    ],
)
def test_unsupported_features_of_a_family_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("name", "default", "longest"),
    [
        ("Llama-3.1-8B", 131072, 131072),
        ("Phi-3-mini-128k", 4096, 131072),
        ("gemma-3-4b's text", 131072, 131072),
        ("Qwen2.5-7B with yarn", 131072, 131072),
        ("opt-350m", 2048, 2048),
    ],
)
def test_default_and_longest_model_len_are_those_of_the_config(name: str, default: int, longest: int) -> None:
    architecture, hub = HUB[name]
    config = ModelConfig.from_dict({"architectures": [architecture], **hub})
    assert (config.default_model_len, config.longest_model_len) == (default, longest)


@pytest.mark.parametrize(("rope_type", "default"), [("linear", 8192), ("dynamic", 2048)])
def test_rope_scaling_extends_the_longest_model_len(rope_type: str, default: int) -> None:
    config = ModelConfig.from_dict(
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": rope_type, "factor": 4.0}}
    )
    assert (config.default_model_len, config.longest_model_len) == (default, 8192)
