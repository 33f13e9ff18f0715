"""config.json in both spellings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import ModelError
from stoker_engine.architectures.model_config import ModelConfig, RopeParameters, read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
GEMMA3: dict[str, Any] = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 512}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("hub", "transformers5"),
    [
        (
            {**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE, "torch_dtype": "bfloat16"},
            {**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}, "dtype": "bfloat16"},
        ),
        (
            {**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        ),
        (
            {**GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2},
            {
                **GEMMA3,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
        (
            {
                **GEMMA3,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 2,
            },
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {
                    **{key: value for key, value in GEMMA3.items() if key != "architectures"},
                    "layer_types": ["sliding_attention", "full_attention"],
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    },
                },
            },
        ),
    ],
)
def test_hub_and_transformers_5_spellings_give_equal_configs(
    hub: dict[str, Any], transformers5: dict[str, Any]
) -> None:
    old, new = ModelConfig.from_dict(hub), ModelConfig.from_dict(transformers5)
    assert replace(old, architecture="") == replace(new, architecture="")


def test_gemma_3_alternates_local_and_global_layers() -> None:
    layers = ModelConfig.from_dict({**GEMMA3, "num_hidden_layers": 12}).layers
    assert [layer.sliding_window for layer in layers] == ([512] * 5 + [None]) * 2
    assert layers[0].rope == RopeParameters(rotary_dim=256, rope_theta=1e4)
    assert layers[5].rope == RopeParameters(rotary_dim=256, rope_theta=1e6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "architectures": ["BertModel"]}, "BertModel is not supported"),
        ({}, "names no architectures"),
        ({**LLAMA, "hidden_size": None}, "hidden_size"),
        ({**LLAMA, "rope_scaling": {"rope_type": "mrope", "factor": 2}}, "mrope"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "encoder"),
    ],
)
def test_unsupported_models_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_dict(config)


def test_folder_without_a_valid_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json"):
        ModelConfig.from_dict(read_config(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        ModelConfig.from_dict(read_config(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="JSON object"):
        ModelConfig.from_dict(read_config(tmp_path))
