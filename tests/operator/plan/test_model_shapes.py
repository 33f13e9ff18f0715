"""The table of well-known models, compared with published sizes and with transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from stoker_common.errors import ModelError
from stoker_common.model_source import DEMO_MODELS, ModelSource
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.sizing.weight_sizes import weight_bytes, weight_sizes
from stoker_operator.plan.model_shapes import Shape, shape_of, table
from stoker_operator.plan.unplannable import Unplannable

#: Numbers of weights that the hub shows for each repository (tied heads counted once, DeepSeek-V3 without the layer for
#: multi-token prediction).
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen-72B": 72_287_920_128,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "openai-community/gpt2": 124_439_808,
    "facebook/opt-125m": 125_239_296,
    "bigscience/bloom": 176_247_271_424,
    "bigscience/bloom-560m": 559_214_592,
}
#: The same for models of other runtimes, and for vision models without their projectors.
PUBLISHED_ELSEWHERE = {
    "meta-llama/Llama-4-Scout-17B-16E": 108_641_793_536,
    "meta-llama/Llama-4-Maverick-17B-128E": 401_583_781_376,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140_630_071_296,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 24_011_361_280,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-3-12b-it": 12_187_325_040,
    "google/gemma-3-27b-it": 27_432_406_640,
    "moonshotai/Kimi-K2-Instruct": 1_026_408_232_448,
    "MiniMaxAI/MiniMax-M2": 228_689_748_992,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512,
}


def source(name: str) -> ModelSource:
    return ModelSource.parse(name if "://" in name else f"hf://{name}")


@pytest.mark.parametrize("name", PUBLISHED)
def test_weight_counts_equal_the_published_ones(name: str) -> None:
    shape = shape_of(source(name), None)
    assert isinstance(shape, Shape)
    assert sum(size.numbers for size in weight_sizes(shape.config)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED_ELSEWHERE)
def test_weight_counts_of_other_runtimes_models_are_nearly_published(name: str) -> None:
    shape = shape_of(source(name), None, "vllm")
    assert isinstance(shape, Shape), shape
    num_weights = sum(size.numbers for size in weight_sizes(shape.config))
    assert num_weights == pytest.approx(PUBLISHED_ELSEWHERE[name], rel=0.007)


@pytest.mark.parametrize("name", [name for name in table() if "/" in name])
def test_every_table_entry_has_a_known_size(name: str) -> None:
    shape = shape_of(source(name), None, "vllm")
    assert isinstance(shape, Shape), shape
    num_weights = sum(size.numbers for size in weight_sizes(shape.config))
    # Chat models and quantized ones are as large as their base model, except for padded matrices.
    assert any(abs(num_weights - size) <= 0.01 * size for size in (PUBLISHED | PUBLISHED_ELSEWHERE).values())


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b", "microsoft/phi-4"]
)
def test_transformers_reads_the_same_shape(name: str) -> None:
    """Fields missing in the table have the default of transformers' config class."""
    shape = shape_of(source(name), None)
    assert isinstance(shape, Shape)
    kind = {"LlamaForCausalLM": "llama", "Qwen3MoeForCausalLM": "qwen3_moe", "Gemma2ForCausalLM": "gemma2"}
    architecture = shape.config.architecture
    transformers_config: Any = CONFIG_MAPPING[kind.get(architecture, "phi3")](**dict(table()[name]))
    assert transformers_config.num_attention_heads == shape.heads
    assert transformers_config.num_key_value_heads == shape.kv_heads
    assert transformers_config.num_hidden_layers == shape.config.num_hidden_layers
    assert (
        getattr(transformers_config, "head_dim", None)
        or transformers_config.hidden_size // shape.heads == shape.config.head_dim
    )
    assert transformers_config.max_position_embeddings == shape.config.longest_model_len


def test_demo_model_has_the_shape_of_the_images_file() -> None:
    import torch

    from stoker_engine.contract.engine_args import EngineArgs
    from stoker_engine.kernels.cpu.library import cpu_library
    from stoker_engine.models.checkpoint import find_checkpoint
    from stoker_engine.models.gguf.gguf_file import GGUFFile
    from stoker_engine.models.hub.demo import demo_model

    cpu = torch.device("cpu")
    for name in DEMO_MODELS:
        shape = shape_of(source(f"demo://{name}"), None)
        assert isinstance(shape, Shape)
        file_config = GGUFFile(demo_model(name)).config()
        if cpu_library(cpu, torch.float32) is not None:
            formats = find_checkpoint(EngineArgs(f"demo://{name}")).weight_formats(torch.float32, cpu)
            assert weight_bytes(shape.config, 4, formats=shape.formats) == weight_bytes(file_config, 4, formats=formats)
            assert weight_bytes(shape.config, 4, formats=shape.formats) < weight_bytes(shape.config, 4)
        assert list(weight_sizes(shape.config)) == list(weight_sizes(file_config))
        assert [layer.cache for layer in shape.config.layers] == [layer.cache for layer in file_config.layers]
        assert (shape.config.dtype, shape.config.longest_model_len) == (
            file_config.dtype,
            file_config.longest_model_len,
        )


@pytest.mark.parametrize(
    ("name", "method", "bits"),
    [
        ("deepseek-ai/DeepSeek-R1", "fp8", 8),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "awq", 4),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "fbgemm_fp8", 8),
    ],
)
def test_quantization_of_a_checkpoint_is_read(name: str, method: str, bits: int) -> None:
    shape = shape_of(source(name), None, "vllm")
    assert isinstance(shape, Shape)
    assert shape.method == method
    held = shape.formats.stored("layers.5.o")
    assert isinstance(held, GroupFormat) and held.bits == bits
    ours = shape_of(source(name), None)
    assert isinstance(ours, Shape)
    stored = ours.formats.stored("layers.5.o")
    assert ours.method == method
    assert isinstance(stored, GroupFormat) and stored.bits == bits


def test_unknown_quantization_method_makes_the_shape_unknown() -> None:
    config = {**table()["Qwen/Qwen3-8B"], "quantization_config": {"quant_method": "torchao"}}
    vllm_shape = shape_of(source("org/model"), config, "vllm")
    assert isinstance(vllm_shape, str) and vllm_shape.startswith(
        "the size of weights quantized by torchao is not known"
    )
    reason = shape_of(source("org/model"), config)
    assert isinstance(reason, str) and reason.startswith(
        "the checkpoint is quantized by 'torchao', which is not supported"
    )


@pytest.mark.parametrize("runtime", ["stoker", "vllm"])
def test_yarn_stretches_the_original_length(runtime: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**table()["Qwen/Qwen3-32B"], "rope_scaling": scaling}
    assert config["max_position_embeddings"] == 40960
    shape = shape_of(ModelSource.parse("hf://org/model"), config, runtime)
    assert isinstance(shape, Shape)
    assert shape.config.longest_model_len == 131072


@pytest.mark.parametrize("architectures", [{}, {"architectures": None}, {"architectures": []}])
def test_config_without_architectures_is_refused_with_the_engines_message(architectures: dict[str, Any]) -> None:
    config = {name: value for name, value in table()["Qwen/Qwen3-32B"].items() if name != "architectures"}
    with pytest.raises(Unplannable) as refused:
        shape_of(ModelSource.parse("hf://org/model"), {**config, **architectures})
    with pytest.raises(ModelError) as engine:
        ModelConfig.from_dict({**config, **architectures})
    (violation,) = refused.value.violations
    assert f"{violation.message}; {violation.remedy}" == f"the model's {engine.value}"


def test_auto_map_for_causal_lm_overrides_the_architectures_name() -> None:
    named = {"architectures": ["ChatGLMModel"], "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLM"}}
    assert isinstance(shape_of(ModelSource.parse("hf://org/model"), named), str)
    with pytest.raises(Unplannable):
        shape_of(ModelSource.parse("hf://org/model"), {**named, "auto_map": {"AutoModel": "modeling_chatglm.ChatGLM"}})
