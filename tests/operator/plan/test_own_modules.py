"""Quantized models that Stoker's engine cannot load: the plan gives the same message as the engine at its start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import CONFIG_MAPPING

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Violation
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan, study
from stoker_operator.plan.unplannable import Unplannable

MODELS: Final = {"exaone4": "Exaone4ForCausalLM", "seed_oss": "SeedOssForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
STATED: Final[dict[str, dict[str, Any]]] = {
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "within text_config": {
        "text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    },
    "ModelOpt, unnamed": {"quantization_config": {"producer": {"name": "modelopt"}, "quant_algo": "FP8"}},
    "no method of ours": {"quantization_config": {"quant_method": "quark"}},
    "no method": {"quantization_config": {"bits": 4}},
}


def refused(spec: Spec, config: dict[str, Any]) -> Violation:
    with pytest.raises(Unplannable) as caught:
        plan(spec, Catalogue.load(), config)
    (violation,) = caught.value.violations
    return violation


def started(folder: Path, config: dict[str, Any], quantization: str | None = None) -> str:
    """Return the engine's error at its start."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises((ModelError, ArgumentError)) as caught:
        find_checkpoint(EngineArgs(str(folder), quantization=quantization))
    return str(caught.value)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stated", STATED)
def test_quantized_checkpoint_is_refused_by_plan_and_engine(
    spec: Callable[..., Spec], tmp_path: Path, kind: str, stated: str
) -> None:
    config = {**CONFIG_MAPPING[kind]().to_dict(), "architectures": [MODELS[kind]], **STATED[stated]}
    found = refused(spec("hf://org/model", "nvidia-h100-80gb", 1, runtime="stoker", image="x"), config)
    assert (found.field, found.reason) == ("spec.model.source", "UnsupportedQuantization")
    assert started(tmp_path, config).startswith(found.message)
    assert found.remedy.startswith("use the unquantized model")
    if "use runtime: vllm" in found.remedy:
        vllm_study = study(spec("hf://org/model", "nvidia-h100-80gb", 1, runtime="vllm"), Catalogue.load(), config)
        assert not vllm_study.unplannable


@pytest.mark.parametrize("kind", MODELS)
def test_unsupported_quantization_on_load_is_refused_by_plan_and_engine(
    spec: Callable[..., Spec], tmp_path: Path, kind: str
) -> None:
    config = {**CONFIG_MAPPING[kind]().to_dict(), "architectures": [MODELS[kind]]}
    engine = {"runtime": "stoker", "image": "x", "quantization": "int8"}
    found = refused(spec("hf://org/model", "nvidia-h100-80gb", 1, **engine), config)
    assert (found.field, found.reason) == ("spec.engine.quantization", "UnsupportedQuantization")
    assert found.message in started(tmp_path, config, "int8")
    del engine["quantization"]
    assert plan(spec("hf://org/model", "nvidia-h100-80gb", 1, **engine), Catalogue.load(), config).unknown


#: Configs of supported families and quantization methods, in unsupported variants.
UNREAD: Final[dict[str, dict[str, Any]]] = {
    "an algorithm": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    "bits": {"quant_method": "gptq", "bits": 5, "group_size": 128},
    "a block": {"quant_method": "fp8", "weight_block_size": [128, 100]},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}


@pytest.mark.parametrize("stated", UNREAD)
def test_unsupported_quantization_config_is_refused_by_plan_and_engine(
    spec: Callable[..., Spec], tmp_path: Path, stated: str
) -> None:
    config = {**CONFIG_MAPPING["qwen3"]().to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    config["quantization_config"] = UNREAD[stated]
    found = refused(spec("hf://org/model", "nvidia-h100-80gb", 1, runtime="stoker", image="x"), config)
    assert (found.field, found.reason) == ("spec.model.source", "UnsupportedQuantization")
    assert started(tmp_path, config) == found.sentence.partition(", or use runtime")[0]


def test_transposed_matrices_are_refused_by_plan_and_engine(spec: Callable[..., Spec], tmp_path: Path) -> None:
    config = {**CONFIG_MAPPING["gpt2"]().to_dict(), "architectures": ["GPT2LMHeadModel"]}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    found = refused(spec("hf://org/model", "nvidia-h100-80gb", 1, runtime="stoker", image="x"), config)
    assert started(tmp_path, config).startswith(found.message)
    assert found.remedy.startswith(
        "use the unquantized model, or use the unquantized model with spec.engine.quantization int8"
    )
