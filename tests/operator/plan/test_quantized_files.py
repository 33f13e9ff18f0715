"""Sizes of quantized checkpoints, for all spellings of quantization in public files."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from stoker_common.model_source import ModelSource
from stoker_engine.sizing.weight_sizes import weight_bytes
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import Shape, shape_of, table
from stoker_operator.plan.planner import plan

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
QWEN_235B = dict(table()["Qwen/Qwen3-235B-A22B"])
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
        pytest.param(
            {
                **LLAMA_70B,
                "quantization_config": {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
            },
            72.7e9,
            RUNTIMES,
            id="Llama-3.1-70B FP8 by hf_quant_config.json",
        ),
        pytest.param(
            {
                **QWEN_235B,
                "quantization_config": {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
            },
            134e9,
            RUNTIMES,
            id="Qwen3-235B NVFP4 by hf_quant_config.json",
        ),
        pytest.param(dict(table()["openai/gpt-oss-20b"]), 13.8e9, ("vllm",), id="gpt-oss-20b MXFP4"),
        pytest.param(dict(table()["openai/gpt-oss-120b"]), 65.3e9, ("vllm",), id="gpt-oss-120b MXFP4"),
        pytest.param(
            {
                **LLAMA_70B,
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "float-quantized",
                    "config_groups": {
                        "group_0": {
                            "targets": ["Linear"],
                            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                        }
                    },
                    "ignore": ["lm_head"],
                },
            },
            72.7e9,
            RUNTIMES,
            id="Llama-70B FP8 by channels",
        ),
        pytest.param(dict(table()["Qwen/Qwen2.5-72B-Instruct-AWQ"]), 41_607_438_677, RUNTIMES, id="Qwen2.5-72B AWQ"),
    ],
)
def test_checkpoint_sizes_equal_their_files(config: dict[str, Any], size: float, runtimes: tuple[str, ...]) -> None:
    for runtime in runtimes:
        assert stored_bytes(config, runtime) == pytest.approx(size, rel=0.01), runtime


@pytest.mark.parametrize("begins", ["model.", "language_model.model.", "model.language_model."])
def test_unquantized_modules_are_found_under_every_text_model_prefix(begins: str) -> None:
    excepted = [each.replace("model.", begins, 1) for each in FIRST_AND_LAST]
    stated = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": excepted}
    assert stored_bytes({**LLAMA_405B, "quantization_config": stated}, "vllm") == pytest.approx(416.4e9, rel=0.002)


#: A matrix of Llama, and its tensors in files: (shape, bytes per element).
OUTPUTS, INNER, GROUP = 4096, 14336, 128
FILES: dict[str, tuple[dict[str, Any], list[tuple[tuple[int, ...], int]]]] = {
    "FP8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        [((OUTPUTS, INNER), 1), ((OUTPUTS // 128, INNER // 128), 4)],
    ),
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        [
            ((INNER // 8, OUTPUTS), 4),
            ((INNER // GROUP, OUTPUTS // 8), 4),
            ((INNER // GROUP, OUTPUTS), 2),
            ((INNER,), 4),
        ],
    ),
    "bitsandbytes nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        [((OUTPUTS * INNER // 2,), 1), ((OUTPUTS * INNER // 64,), 4)],
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        [((OUTPUTS, INNER), 1), ((OUTPUTS,), 4)],
    ),
    "FP8 channels": (
        {"quant_method": "fbgemm_fp8"},
        [((OUTPUTS, INNER), 1), ((OUTPUTS, 1), 4)],
    ),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("method", FILES)
def test_matrix_takes_the_bytes_of_its_tensors(method: str, runtime: str) -> None:
    stated, tensors = FILES[method]
    config = {
        **table()["meta-llama/Meta-Llama-3-8B"], "intermediate_size": INNER, "hidden_size": OUTPUTS,
        "quantization_config": stated,
    }  # fmt: skip
    shape = shape_of(ModelSource.parse("hf://org/model"), config, runtime)
    assert isinstance(shape, Shape), shape
    down = shape.formats.stored("layers.0.down")
    assert down is not None and shape.formats.stored("embed") is None
    expected = sum(prod(sizes) * bytes_each for sizes, bytes_each in tensors)
    # Stoker has separate scales for each row of a block: 4 bytes per 128 elements.
    tolerance = 0.035 if (method, runtime) == ("FP8 blocks", "stoker") else 0.01
    assert down.matrix_bytes(OUTPUTS, INNER) == pytest.approx(expected, rel=tolerance)


#: Methods with one scale per tensor, and the bytes of scales per tensor.
BY_TENSOR: dict[str, tuple[dict[str, Any], float, int]] = {
    "ModelOpt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1, 4),
    "ModelOpt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16, 4),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, 1, 4),
    "FP8 by tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "scale_dtype": "float32"},
                }
            },
        },
        1,
        4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("inner", [128, 160, 4096])
@pytest.mark.parametrize("method", BY_TENSOR)
def test_per_tensor_scale_is_counted_once(method: str, inner: int) -> None:
    stated, bytes_each, scale = BY_TENSOR[method]
    config = {**table()["meta-llama/Meta-Llama-3-8B"], "intermediate_size": inner, "quantization_config": stated}
    shape = shape_of(ModelSource.parse("hf://org/model"), config, "vllm")
    assert isinstance(shape, Shape), shape
    down = shape.formats.stored("layers.0.down")
    assert down is not None
    assert down.matrix_bytes(OUTPUTS, inner) == OUTPUTS * inner * bytes_each + scale


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("name", "size"), [("openai/gpt-oss-20b", 13.8e9), ("openai/gpt-oss-120b", 65.3e9)])
def test_unquantized_weights_have_the_dtype_of_the_files(
    name: str, size: float, runtime: str, spec: Callable[..., Spec]
) -> None:
    config = {field: value for field, value in table()[name].items() if field != "torch_dtype"}
    files = {**config, "dtype": "bfloat16"}  # as found by `checkpoint_files`
    tested_spec = spec(f"hf://{name}", "nvidia-h100-80gb", 1, runtime=runtime, maxModelLen=1024, image="x")
    for tensors in (None, files):
        found = plan(tested_spec, Catalogue.load(), tensors).estimate
        assert found is not None
        assert found.weight_bytes_per_gpu == pytest.approx(size, rel=0.015)


def test_table_states_every_dtype() -> None:
    assert [name for name, config in table().items() if not (config.get("dtype") or config.get("torch_dtype"))] == []
