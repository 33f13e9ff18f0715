"""PEFT's `adapter_config.json`: fields that are used, ignored, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from stoker_common.errors import AdapterError
from stoker_engine.lora.adapter_config import AdapterConfig

_PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
_INVALID_RANKS: list[Any] = [10**400, 0, -1, True, "8", 1.5, None, [8], {}]
_MODULES = [
    f"model.{stack}.{layer}.{module}"
    for stack in ("layers", "blocks")
    for layer in (0, 1, 11)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.experts.3.up_proj", "mlp.q_proj_2")
] + ["lm_head", "model.embed_tokens", "q_proj"]


def parse(**fields: Any) -> AdapterConfig:
    return AdapterConfig.parse(json.dumps({**_PLAIN, **fields}).encode())


def refusal(**fields: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        parse(**fields)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    message.encode()
    return message


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "up_proj"]},
        {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]},
        {"target_modules": r".*\.[01]\..*(q|up)_proj"},
        {"target_modules": r"model\.layers\.1\.mlp\.up_proj|lm_head"},
        {"target_modules": r"(?i).*Q_PROJ"},
        {"target_modules": r".*layers\.\d{1,2}\..*_proj(_\d{2,})?"},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 11]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1, "layers_pattern": "blocks"},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": ["(layers|blocks)"]},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "up_proj"], "layers_to_transform": [1]},
    ],
)
def test_targets_equal_those_of_peft(fields: dict[str, Any]) -> None:
    theirs, ours = LoraConfig(**fields), parse(**fields)
    assert [bool(check_target_module_exists(theirs, name)) for name in _MODULES] == [*map(ours.targets, _MODULES)]


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 2, "up_proj": 3},
        {r"layers\.\d+\.self_attn\.q_proj": 2, "q_proj": 3},
        {r"^model\.layers\.1\..*": 2, r".*q_proj": 5},
        {"model.layers.11.mlp.up_proj": 7},
        {"q_proj|up_proj": 2, "k_proj": 9},
    ],
)
def test_first_matching_pattern_gives_rank_and_alpha(patterns: dict[str, int]) -> None:
    ours = parse(rank_pattern=patterns, alpha_pattern=patterns, r=16, lora_alpha=4)
    rooted = parse(rank_pattern=patterns, alpha_pattern=patterns, r=16, lora_alpha=4, use_rslora=True)
    for name in _MODULES:
        key = get_pattern_key(list(patterns), name)
        rank, alpha = patterns.get(key, 16), patterns.get(key, 4)
        assert ours.rank_and_scale(name) == (rank, alpha / rank)
        assert rooted.rank_and_scale(name)[1] == pytest.approx(alpha / rank**0.5)


@pytest.mark.parametrize(
    "fields",
    [
        *({"init_lora_weights": how} for how in (True, False, "gaussian", "eva", "orthogonal", None)),
        {"inference_mode": True, "lora_dropout": 0.1, "revision": None, "task_type": "CAUSAL_LM", "peft_version": "1"},
        {"bias": "none", "modules_to_save": None, "use_dora": False, "trainable_token_indices": None},
        {"fan_in_fan_out": True, "megatron_core": "megatron.core", "loftq_config": {}, "auto_mapping": {"a": "b"}},
        {"layers_pattern": None, "layers_to_transform": [], "rank_pattern": {}, "alpha_pattern": None},
    ],
)
def test_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert parse(**fields).targets("model.layers.0.self_attn.q_proj")


def test_every_field_of_peft_is_known() -> None:
    content = json.dumps(dataclasses.asdict(LoraConfig(r=3, target_modules=["q_proj"])), default=sorted)
    assert AdapterConfig.parse(content.encode()).r == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "LOHA"},
        {"peft_type": None},
        {"peft_type": ["LORA"]},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
        {"trainable_token_indices": {"embed_tokens": [1]}},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"layer_replication": [[0, 2]]},
        {"alora_invocation_tokens": [1]},
        {"use_qalora": True},
        {"arrow_config": {"top_k": 2}},
        {"ensure_weight_tying": True},
        {"megatron_config": {"a": 1}},
        *({"init_lora_weights": how} for how in ("pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq")),
        *({"r": rank} for rank in _INVALID_RANKS),
        *({"lora_alpha": alpha} for alpha in ("8", True, None, float("inf"), float("nan"), 10**400, [1])),
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": 7},
        {"alpha_pattern": {"q_proj": "x"}},
        {"alpha_pattern": "q_proj"},
        {"target_modules": 3},
        {"target_modules": {"q_proj": 1}},
        {"target_modules": [1]},
        {"target_modules": ["q_proj", ""]},
        {"target_modules": [None]},
        {"exclude_modules": [["q_proj"]]},
        {"target_parameters": 5},
        {"layers_to_transform": "1"},
        {"layers_to_transform": True},
        {"layers_to_transform": [1.0]},
        {"layers_to_transform": {"1": 1}},
        {"layers_pattern": 7},
        {"use_rslora": "false"},
        {"use_rslora": 1},
        {"fan_in_fan_out": "no"},
        {"lora_new_thing": 1},
        {"lora_new_thing": "\ud800\n" * 1000},
    ],
    ids=repr,
)
def test_error_names_the_field(fields: dict[str, Any]) -> None:
    assert next(iter(fields)) in refusal(**fields)


def test_unknown_fields_are_refused() -> None:
    assert "not known" in refusal(**{"\ud800\n" * 1000: True})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"r": ' + b"9" * 10_000 + b"}", b"[" * 200_000,
     b'{"peft_type": ' + b'{"a":' * 100_000, b"\0" * 1000, b'{"a": "' + b"x" * 1_000_000],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_malformed_configs_are_refused(content: bytes) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json") as caught:
        AdapterConfig.parse(content)
    assert len(str(caught.value)) < 300


_SLOW = ".*" * 30 + "[0-9]{5}"


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": _SLOW},
        {"target_modules": ["q_proj"], "exclude_modules": _SLOW},
        {"target_modules": ["q_proj"], "rank_pattern": {_SLOW: 1}},
        {"target_modules": ["q_proj"], "alpha_pattern": {_SLOW: 1}},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": [_SLOW]},
        {"target_modules": ["q_proj"], "rank_pattern": {f".*{index}.*[0-9]{{5}}": 1 for index in range(20_000)}},
        {"target_modules": "(a?){10000}" * 500},
        {"target_modules": "(" * 60 + "a?" + "){9}" * 60},
        {"target_modules": "(" * 12 + "a?" + "){1,9}" * 12},
        {"target_modules": "(a|(?R))*" * 100},
        {"target_modules": "(a?)*" * 1600},
        {"target_modules": "|".join("q_proj" for _ in range(100_000))},
    ],
    ids=lambda fields: f"{list(fields)[-1]}-{str(fields[list(fields)[-1]])[:14]}",
)
def test_matching_of_patterns_is_limited_in_time(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to all patterns together: an adapter has hundreds of names."""
    monkeypatch.setattr("stoker_engine.lora.adapter_config._PATTERNS_S", 0.2)
    config = parse(**fields)
    with pytest.raises(AdapterError, match=r"too long|not a valid pattern"):
        for index in range(300):
            name = f"model.layers.{index}.self_attn.{'a_' * 15}.q_proj"
            config.targets(name)
            config.rank_and_scale(name)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "**",
        "[",
        "(?P<x",
        "a{2,1}",
        r"\N{nothing}",
        "(" * 8000,
        "(?R)",
        "(?P<idx>a)(?P<idx>b)",
        "(q_proj){e<=3}",
        r"\L<x>",
    ],
)
@pytest.mark.parametrize("name", ["target_modules", "exclude_modules", "layers_pattern", "rank_pattern"])
def test_invalid_patterns_are_refused(name: str, pattern: str) -> None:
    fields: dict[str, Any] = {name: {pattern: 1} if name == "rank_pattern" else pattern}
    config = parse(**fields, layers_to_transform=[1])
    with pytest.raises(AdapterError, match="is not a valid pattern") as caught:
        config.targets("model.layers.1.self_attn.q_proj")
        config.rank_and_scale("model.layers.1.self_attn.q_proj")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("pattern", ["(x)|layers", "(l)ayers", "|(x)|"])
def test_groups_in_layers_pattern_do_not_capture_the_layer(pattern: str) -> None:
    config = parse(layers_pattern=pattern, layers_to_transform=[1])
    config.targets("model.layers.1.self_attn.q_proj")
    config.targets("layers.1.q_proj")
    config.targets("x.q_proj")


def test_layer_numbers_may_have_thousands_of_digits() -> None:
    assert not parse(layers_to_transform=[1]).targets(f"model.layers.{'9' * 5000}.self_attn.q_proj")


_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 8, 10**9, 10**400, 1.5, float("nan"), float("inf"), -0.0, "", "8", "LORA", "q_proj",
    "all-linear", "(", ".*", "\ud800", "\0", "none", [], [None], ["q_proj"], [[]], [1], {}, {"q_proj": 2}, {"(": 1},
    {"": 1}, {"a": None}, {"a": {"b": []}},
]  # fmt: skip


def test_mutated_values_are_read_or_refused() -> None:
    rng, whole = (
        random.Random(0),
        json.loads(json.dumps(dataclasses.asdict(LoraConfig(target_modules="x")), default=sorted)),
    )
    num_read = 0
    for _ in range(3000):
        fields = {**_PLAIN, "layers_to_transform": [1]}
        for name in rng.sample(sorted(whole), rng.randint(1, 3)):
            fields[name] = rng.choice(_VALUES)
        try:
            config = AdapterConfig.parse(json.dumps(fields).encode())
            for module in ("model.layers.1.self_attn.q_proj", "lm_head"):
                config.targets(module)
                config.is_target_parameter(module)
                config.rank_and_scale(module)
            num_read += 1
        except AdapterError as error:
            assert len(str(error)) < 300
    assert num_read > 100


def test_mutated_bytes_are_read_or_refused() -> None:
    rng, content = random.Random(1), json.dumps({**_PLAIN, "rank_pattern": {"q_proj": 2}}).encode()
    for _ in range(3000):
        mutated = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            AdapterConfig.parse(bytes(mutated)).rank_and_scale("model.layers.1.self_attn.q_proj")
        except AdapterError as error:
            assert len(str(error)) < 300
