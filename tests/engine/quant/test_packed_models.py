"""Whole models of GPTQ, AWQ and bitsandbytes have bitwise the outputs of their dequantized values in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stoker_common.errors import WeightsError
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.architectures.quantization.read import read_quantization
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels import select
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.sizing.planned_formats import stated_formats
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.served import served
from .packed_words import Quantized
from .quantized_pairs import answers_of, assert_close, save_checkpoint, source_model

_UNQUANTIZED = re.compile(r"norm|embed_tokens|lm_head|gate\.weight|router|bias")

#: Maps a matrix's name, shape and number to its tensors and its values.
Write = Callable[[str, int, int, int], tuple[dict[str, torch.Tensor], torch.Tensor]]


def _gptq(version: str = "gptq", **options: Any) -> tuple[Write, dict[str, Any]]:
    def write(name: str, outputs: int, inner: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        matrix = Quantized(outputs, inner, seed=seed, **options)
        return matrix.gptq(name, version == "gptq"), matrix.weight

    one = Quantized(8, 32, **options)
    stated = {"bits": one.bits, "group_size": one.group, "sym": one.symmetric, "desc_act": one.act_order}
    return write, {"quant_method": "gptq", "checkpoint_format": version, **stated}


def _awq(group: int) -> tuple[Write, dict[str, Any]]:
    def write(name: str, outputs: int, inner: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        matrix = Quantized(outputs, inner, group=group, seed=seed)
        return matrix.awq(name), matrix.weight

    return write, {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def _int8(name: str, outputs: int, inner: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (outputs, inner), generator=random, dtype=torch.int8)
    largest = torch.rand(outputs, generator=random) * 0.5 + 0.1
    return {f"{name}.weight": codes, f"{name}.SCB": largest}, codes.float() * (largest / 127).unsqueeze(1)


def _nf4(name: str, outputs: int, inner: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    with safe_open(Path(__file__).parent / "recorded" / "bitsandbytes.safetensors", "pt") as file:
        table = file.get_tensor("blocks.weight.quant_map")
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs * inner,), generator=random, dtype=torch.uint8)
    scales = torch.rand(-(-len(codes) // 64), generator=random) * 0.5 + 0.1
    dequantized = table[codes.int()] * scales.repeat_interleave(64)[: len(codes)]
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [outputs, inner]})
    tensors = {
        "": (codes[::2] << 4 | codes[1::2]).unsqueeze(1),
        ".absmax": scales,
        ".quant_map": table,
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }
    return {f"{name}.weight{end}": tensor for end, tensor in tensors.items()}, dequantized.view(outputs, inner)


_BNB = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
_METHODS: dict[str, tuple[Write, dict[str, Any]]] = {
    "GPTQ": _gptq(group=32),
    "GPTQ of 3 bits": _gptq("gptq_v2", bits=3, group=16),
    "GPTQ of 2 bits": _gptq(bits=2, group=-1),
    "GPTQ of 8 bits": _gptq(bits=8, group=64, symmetric=True),
    "GPTQ in order of groups": _gptq(group=32, symmetric=True, act_order=True),
    "AWQ": _awq(32),
    "AWQ in bfloat16": _awq(-1),
    "int8": (_int8, {**_BNB, "load_in_8bit": True}),
    "nf4": (_nf4, {**_BNB, "load_in_4bit": True}),
}

#: All methods for Llama; for other families what differs: biases, fused matrices, experts.
_CASES = [
    *(("llama", method) for method in _METHODS),
    *(("qwen2", method) for method in ("GPTQ", "int8")),
    *(("phi3", method) for method in ("AWQ", "nf4", "GPTQ in order of groups")),
    *(("mixtral", method) for method in ("GPTQ of 8 bits", "AWQ", "nf4", "GPTQ in order of groups")),
]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Callable[..., tuple[Path, Path]]:
    """A quantized checkpoint, and its dequantized equivalent."""
    sources = dict[str, Path]()

    def make(family: str, method: str, head: bool = False) -> tuple[Path, Path]:
        if family not in sources:
            model = source_model(family)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter)
            sources[family] = tmp_path_factory.mktemp("source")
            model.save_pretrained(sources[family])
        config = json.loads((sources[family] / "config.json").read_text()) | {"dtype": "float32"}
        write, stated = _METHODS[method]
        dequantized, quantized = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        tensors = load_file(sources[family] / "model.safetensors")
        for seed, (name, tensor) in enumerate(tensors.items()):
            if tensor.dim() != 2 or (_UNQUANTIZED.search(name) and not (head and "lm_head" in name)):
                dequantized[name] = quantized[name] = tensor
            else:
                parts, dequantized[name] = write(name.removesuffix(".weight"), *tensor.shape, seed)
                quantized |= parts
        folder = tmp_path_factory.mktemp("pair")
        stated = {**stated, "lm_head": True} if head else stated
        return (
            save_checkpoint(folder / "quantized", tiny_llama, {**config, "quantization_config": stated}, quantized),
            save_checkpoint(folder / "dequantized", tiny_llama, config, dequantized),
        )

    return make


def _decoder(folder: Path) -> Decoder:
    checkpoint, cpu, dtype = find_checkpoint(EngineArgs(str(folder))), torch.device("cpu"), torch.float32
    build = Build(dtype, attention_backend(cpu, served(dtype)), select.select_kernels(cpu, dtype))
    model = checkpoint.load(build, cpu, 128)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(("family", "method"), _CASES)
def test_models_answer_as_dequantized_and_take_the_planned_bytes(
    family: str, method: str, pair_of: Callable[..., tuple[Path, Path]]
) -> None:
    quantized, dequantized = pair_of(family, method)
    answers, expected = answers_of(quantized), answers_of(dequantized)
    if "order" in method:  # sums have another order, too
        assert_close(answers, expected)
    else:
        assert answers == expected
    model_config = read_config(quantized)
    quantization = read_quantization(model_config)
    assert quantization is not None
    config = ModelConfig.from_dict(model_config)
    held = sum(target.tensor.nbytes for target in _decoder(quantized).weight_targets().values())
    assert held == weight_bytes(config, 4, formats=stated_formats(config, quantization))
    assert held < 0.8 * sum(target.tensor.nbytes for target in _decoder(dequantized).weight_targets().values())


@pytest.mark.parametrize("method", ["GPTQ", "GPTQ in order of groups", "AWQ", "nf4"])
def test_answers_without_cpu_kernels_are_close(
    method: str, pair_of: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "cpu_library", lambda device, dtype: None)
    quantized, dequantized = pair_of("llama", method)
    assert_close(answers_of(quantized), answers_of(dequantized))


def test_head_may_be_quantized(pair_of: Callable[..., tuple[Path, Path]]) -> None:
    quantized, dequantized = pair_of("llama", "GPTQ", head=True)
    assert answers_of(quantized) == answers_of(dequantized)
    assert _decoder(quantized).weight_targets()["lm_head.weight"].stored is not None


def test_zero_biases_of_unbiased_models_are_ignored(pair_of: Callable[..., tuple[Path, Path]]) -> None:
    """AutoGPTQ wrote a bias for each matrix. Zeros change nothing; other values are refused."""
    quantized, dequantized = pair_of("llama", "GPTQ")
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.bias"
    save_file({**tensors, name: torch.zeros(64)}, quantized / "model.safetensors")
    assert answers_of(quantized) == answers_of(dequantized)
    save_file({**tensors, name: torch.ones(64)}, quantized / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"does not use: {name}"):
        _decoder(quantized)


@pytest.mark.parametrize(
    ("method", "part", "change", "message"),
    [
        ("GPTQ", "scales", lambda x: x * torch.nan, "down_proj.weight holds nan or infinity"),
        ("AWQ", "scales", lambda x: x * torch.inf, "down_proj.weight holds nan or infinity"),
        ("int8", "SCB", lambda x: x * torch.nan, "down_proj.weight holds nan or infinity"),
        ("nf4", "weight.absmax", lambda x: x * torch.inf, "down_proj.weight holds nan or infinity"),
        ("GPTQ", "g_idx", lambda x: x[:32], "down_proj.* has shape"),
        ("AWQ", "qweight", lambda x: x[:32], "down_proj.* has shape"),
    ],
)
def test_damaged_checkpoints_are_refused_with_a_short_message(
    method: str, part: str, change: Any, message: str, pair_of: Callable[..., tuple[Path, Path]]
) -> None:
    folder, _ = pair_of("llama", method)
    name = f"model.layers.1.mlp.down_proj.{part}"
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: change(tensors[name]).contiguous()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=message) as error:
        _decoder(folder)
    assert len(str(error.value)) < 400
