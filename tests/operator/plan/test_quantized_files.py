"""How large quantized checkpoints are, by every spelling in which public files say that they are quantized."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_engine.contract.sources import ModelSource
from stoker_engine.sizing.weight_sizes import weight_bytes
from stoker_operator.plan.model_shapes import Shape, shape_of, table

RUNTIMES = ("vllm", "stoker")
LLAMA_70B = dict(table()["meta-llama/Llama-3.1-70B"])
LLAMA_405B = dict(table()["meta-llama/Llama-3.1-405B"])
QWEN_32B = dict(table()["Qwen/Qwen3-32B"])
KIMI_K2: dict[str, Any] = {
    **{name: value for name, value in table()["deepseek-ai/DeepSeek-R1"].items() if name != "quantization_config"},
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
}
MINIMAX = {name: value for name, value in table()["MiniMaxAI/MiniMax-M2"].items() if name != "quantization_config"}
FIRST_AND_LAST = [
    f"model.layers.{layer}.{module}_proj"
    for layer in (0, 125)
    for module in (*(f"self_attn.{part}" for part in "qkvo"), *(f"mlp.{part}" for part in ("gate", "up", "down")))
]
NVFP4 = {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}


def stored_bytes(config: dict[str, Any], runtime: str) -> int:
    shape = shape_of(ModelSource.parse("hf://org/model"), config, runtime)
    assert isinstance(shape, Shape), shape
    return weight_bytes(shape.config, 2, formats=shape.formats)


@pytest.mark.parametrize(
    ("config", "size", "runtimes"),
    [
        pytest.param(
            {
                **KIMI_K2,
                "quantization_config": {
                    **NVFP4,
                    "quant_method": "modelopt",
                    "ignore": ["lm_head", "*self_attn*", "*shared_experts*", "model.layers.0.*"],
                },
            },
            595e9,
            ("vllm",),
            id="Kimi-K2 NVFP4",
        ),
        pytest.param(
            {**MINIMAX, "quantization_config": {**NVFP4, "quant_method": "modelopt", "ignore": ["*self_attn*"]}},
            134e9,
            ("vllm",),
            id="MiniMax-M2.5 NVFP4",
        ),
        pytest.param(
            {**LLAMA_70B, "quantization_config": {**NVFP4, "quant_method": "modelopt", "ignore": ["lm_head"]}},
            39.8 * 2**30,
            RUNTIMES,
            id="Llama-70B NVFP4",
        ),
        pytest.param(
            {
                "architectures": ["KimiK25ForConditionalGeneration"],
                "text_config": {**KIMI_K2, "quantization_config": INT4},
            },
            595e9,
            ("vllm",),
            id="Kimi-K2.5 int4, within text_config",
        ),
        pytest.param(
            {**QWEN_32B, "quantization_config": {"quant_algo": "FP8", "producer": {"name": "modelopt"}}},
            34.3e9,
            RUNTIMES,
            id="Qwen3-32B FP8 without a method",
        ),
        pytest.param(
            {
                **LLAMA_405B,
                "quantization_config": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": FIRST_AND_LAST},
            },
            416.4e9,
            RUNTIMES,
            id="Llama-3.1-405B FBGEMM with exceptions",
        ),
        pytest.param(dict(table()["Qwen/Qwen2.5-72B-Instruct-AWQ"]), 41_607_438_677, RUNTIMES, id="Qwen2.5-72B AWQ"),
    ],
)
def test_a_checkpoint_is_as_large_as_its_files(config: dict[str, Any], size: float, runtimes: tuple[str, ...]) -> None:
    for runtime in runtimes:
        assert stored_bytes(config, runtime) == pytest.approx(size, rel=0.01), runtime


@pytest.mark.parametrize("begins", ["model.", "language_model.model.", "model.language_model."])
def test_exceptions_are_counted_by_whatever_name_the_text_model_has(begins: str) -> None:
    excepted = [each.replace("model.", begins, 1) for each in FIRST_AND_LAST]
    stated = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": excepted}
    assert stored_bytes({**LLAMA_405B, "quantization_config": stated}, "vllm") == pytest.approx(416.4e9, rel=0.002)
