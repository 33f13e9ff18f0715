"""For any config.json of a hub and any sizes, the planner returns a plan or a refusal. It never fails, and its work is
bounded.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_engine.architectures.families.registry import FAMILIES
from stoker_operator.api.manifest import parse
from stoker_operator.api.violation import Refused
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import table
from stoker_operator.plan.planner import plan, planned_ways_out, study

from ...support.work import work
from .conftest import LLAMA_405B, document

#: Largest number of steps; a second has more than ten million. Reading a quantized mixture of 200 layers takes two
#: million, since each expert's name is matched; each way to split adds some thousands.
MOST_WORK = 3_000_000
CONFIGS = [dict(config) for name, config in table().items() if "/" in name]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 2), max_size=3),
    st.sampled_from(
        [{}, {"quant_method": 3}, {"quant_method": "awq", "bits": "x"}, {"quant_method": "gptq", "bits": -4}]
    ),
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=st.sampled_from(CONFIGS),
    changes=st.dictionaries(
        st.sampled_from([*sorted({key for config in CONFIGS for key in config}), "quantization_config", "text_config"]),
        JUNK,
        max_size=3,
    ),
    count=st.sampled_from([1, 2, 7, 8, 64]),
)
def test_any_config_is_planned_or_refused(config: dict[str, Any], changes: dict[str, Any], count: int) -> None:
    spec = parse(document("hf://org/model", "nvidia-l4", count)).spec

    def answered() -> None:
        try:
            planned = plan(spec, Catalogue.load(), {**config, **changes})
            assert planned.estimate or planned.unknown
        except Refused as refused:
            assert all(violation.field.startswith("spec.") for violation in refused.violations)

    assert work(answered) < MOST_WORK


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_config_with_only_an_architecture_is_studied(architecture: str) -> None:
    spec = parse(document("hf://org/model", "nvidia-h100-80gb", 1)).spec
    study(spec, Catalogue.load(), {"architectures": [architecture]})


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 1001},
        {"num_attention_heads": 10**9},
        {"num_hidden_layers": -1},
        {"hidden_size": 0},
        {"max_position_embeddings": 0},
        {"architectures": 7},
        {"vocab_size": "many"},
    ],
)
def test_malformed_sizes_make_the_shape_unknown(change: dict[str, Any]) -> None:
    config = {**table()["Qwen/Qwen3-8B"], **change}
    planned = plan(parse(document("hf://org/model", "nvidia-l4", 1)).spec, Catalogue.load(), config)
    assert planned.estimate is None
    assert planned.unknown


def test_largest_refusal_takes_bounded_work() -> None:
    """The slowest case: nothing fits, so that all splits and larger machines are tried."""
    spec = parse(document(LLAMA_405B, "nvidia-h100-80gb", 8)).spec
    study(spec, Catalogue.load())  # reads the tables

    def refused() -> None:
        with pytest.raises(Refused):
            plan(spec, Catalogue.load())

    assert work(refused) < MOST_WORK


@pytest.mark.parametrize(
    ("model", "accelerator", "runtime"),
    [
        ("deepseek-ai/DeepSeek-V3", "nvidia-h100-80gb", "stoker"),
        ("meta-llama/Llama-3.1-405B-Instruct", "nvidia-l4", "vllm"),
        ("Qwen/Qwen3-30B-A3B", "nvidia-l4", "stoker"),
    ],
)
def test_deep_model_on_many_gpus_takes_bounded_work(model: str, accelerator: str, runtime: str) -> None:
    """The given sizes do not divide the model, or a rule refuses them: all splits and remedies are tried."""
    config = {name: value for name, value in table()[model].items() if name != "layer_types"}
    config["num_hidden_layers"] = 200
    for sizes in (None, {"tensor": 48, "data": 1}):
        manifest = document("hf://org/m", accelerator, 64, parallelism=sizes, runtime=runtime, image="mine:1")

        def answered(manifest: dict[str, Any] = manifest, config: dict[str, Any] = config) -> None:
            try:
                plan(parse(manifest).spec, Catalogue.load(), config)
            except Refused as refused:
                assert planned_ways_out(manifest, refused.violations, Catalogue.load(), lambda _: config)

        assert work(answered) < 2 * MOST_WORK


def test_huge_mixture_of_experts_is_planned_or_refused() -> None:
    config = {**table()["Qwen/Qwen3-30B-A3B"], "num_experts": 256, "num_hidden_layers": 1000}
    for quantization in (None, "fp8"):
        engine = {"runtime": "stoker", "image": "mine:1"} | ({"quantization": quantization} if quantization else {})
        for count in (1, 8, 64):
            try:
                plan(parse(document("hf://org/m", "nvidia-h100-80gb", count, **engine)).spec, Catalogue.load(), config)
            except Refused as refused:
                assert all(violation.field.startswith("spec.") for violation in refused.violations)
