"""config.json is untrusted: whatever a field contains, it is read, or refused with a message.

First every field of every family with every odd value; then several at once, drawn by hypothesis.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.contract.json_file import read_json_object
from stoker_engine.sizing.kv_format import kv_format
from stoker_engine.sizing.memory import Device, Numbers, memory_use

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, -(2**63), 10**9, 10**30, 10**400),
    *(0.0, 0.5, -0.5, 1.5, 1e-40, 1e-320, 1e38, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "1", "default", "yarn", "\udc80", "a" * 10_000),
    *([], [None], [0], [-1], ["x"], [[]], [1.5], [2**64], [{}], ["sliding_attention"] * 3, list(range(100))),
    *({}, {"x": 1}, {"rope_type": "yarn"}, {"type": []}, {"full_attention": 5}, {"full_attention": {"rope_theta": {}}}),
]
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "truncate"),
    *("high_freq_factor", "beta_fast", "beta_slow", "short_factor", "long_factor", "attention_factor", "mscale"),
    *("mscale_all_dim", "partial_rotary_factor"),
)
NUMBERS = Numbers(2, kv_format("auto", "bfloat16"), 16, 2048, 128)
DEVICE = Device(16 * 2**30, 0.9, on_cpu=True)


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _read(config: dict[str, Any]) -> bool:
    """Return whether the config can be read; if so, its memory can be calculated too."""
    try:
        read = ModelConfig.from_dict(config)
    except ModelError as error:
        assert len(str(error)) < 2000, "the message is too long"
        return False
    assert all(0 <= token < read.vocab_size for token in read.eos_token_ids)
    assert read.default_model_len >= 1
    assert read.num_hidden_layers >= 1
    memory_use(read, NUMBERS, DEVICE)
    return True


@pytest.fixture
def fields_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return the fields that are read from an empty config of an architecture."""

    def record(architecture: str) -> list[str]:
        seen: dict[str, None] = {}
        get = Fields.get

        def spy(self: Fields, name: str) -> Any:
            seen[name] = None
            return get(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(Fields, "get", spy)
            assert _read({"architectures": [architecture]})
        return list(seen)

    return record


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fields_with_odd_values_are_read_or_refused(architecture: str, fields_of: Callable[[str], list[str]]) -> None:
    fields = fields_of(architecture)
    assert {"vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id"} <= set(fields)
    for field in (*fields, "text_config", "quantization_config", "is_encoder_decoder"):
        for value in (*ODD, _nested(2000)):
            config = {field: value}
            if architecture == "Gemma3ForConditionalGeneration" and field != "text_config":
                config = {"text_config": {"vocab_size": 9, **config}}
            _read({"architectures": [architecture], **config})


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_rope_parameters_with_odd_values_are_read_or_refused(architecture: str, rope_type: str) -> None:
    given: dict[str, Any] = {"rope_type": rope_type, "factor": 4.0, "short_factor": [1.0] * 64}
    for field in ROPE_FIELDS:
        for value in (*ODD, _nested(2000)):
            rope = {**given, "long_factor": [1.0] * 64, field: value}
            _read({"architectures": [architecture], "rope_scaling": rope})
            _read({"architectures": [architecture], "rope_parameters": {"full_attention": rope}})


@pytest.mark.parametrize("value", ODD)
def test_odd_architectures_are_refused(value: Any) -> None:
    assert not _read({"architectures": value})


@settings(max_examples=500)
@given(data=st.data())
def test_several_odd_values_at_once_are_read_or_refused(data: st.DataObject) -> None:
    sizes = st.sampled_from([*ODD, 4, 8, 16, 64, 65, 1000])
    names = [
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "sliding_window", "layer_types", "max_position_embeddings", "rope_theta", "rotary_dim"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
        *("sliding_window_pattern", "max_window_layers", "use_sliding_window", "partial_rotary_factor", "eos_token_id"),
    ]
    architecture = data.draw(st.sampled_from(sorted(FAMILIES)))
    _read({"architectures": [architecture], **data.draw(st.dictionaries(st.sampled_from(names), sizes, max_size=6))})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"5",
        b'{"a": NaN}x',
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b'{"vocab_size": ' + b"9" * 5000 + b"}",
        b"\x00" * 100,
    ],
)
def test_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_dict(read_config(tmp_path))


def test_folder_named_like_the_config_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError):
        read_json_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", -1, "num_hidden_layers must be a number from 1 to 10000, not -1"),
        ("num_hidden_layers", 10**9, "num_hidden_layers must be a number from 1 to 10000, not 1000000000"),
        ("num_attention_heads", 0, "num_attention_heads must be a number from 1 to 100000, not 0"),
        ("eos_token_id", "x", "eos_token_id must be a number"),
        ("eos_token_id", [1, "x"], "eos_token_id must be a list of int"),
        ("eos_token_id", -1, "eos_token_id must be a number from 0"),
        ("tie_word_embeddings", "false", "tie_word_embeddings must be true or false, not 'false'"),
        ("hidden_size", 64.5, "hidden_size must be a whole number"),
        ("head_dim", 10**12, "head_dim must be a number"),
    ],
)
def test_error_names_the_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError) as error:
        ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"], field: value})
    assert message in str(error.value)


def test_too_many_experts_are_refused() -> None:
    with pytest.raises(ModelError, match="100000000 experts; 10000 is the maximum"):
        ModelConfig.from_dict({"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**8})


def test_end_tokens_outside_the_vocabulary_are_ignored() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "eos_token_id": [5, 100, 2**40]}
    assert ModelConfig.from_dict(json.loads(json.dumps(config))).eos_token_ids == (5,)
