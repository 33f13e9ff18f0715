"""Whole models: a quantized checkpoint answers as one of its dequantized numbers in float32 does, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stoker_engine import LLM, SamplingParams

from .compressed import Compressed

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "llama tied": {**_SIZES, "tie_word_embeddings": True},
    "qwen2": _SIZES,
    "phi3": _SIZES,
    "mixtral": {**_SIZES, "num_local_experts": 4},
    "deepseek_v3": {
        **_SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}

#: What stays as numbers.
_NUMBERS = re.compile(r"norm|embed_tokens|lm_head|mlp\.gate\.weight|block_sparse_moe\.gate\.weight|router|bias")

#: A matrix → its tensors by the ends of their names, what it means in float32, and the ``quantization_config``.
Quantized = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def _compressed(**case: Any) -> Callable[[torch.Tensor], Quantized]:
    def quantized(weight: torch.Tensor) -> Quantized:
        made = Compressed(weight=weight, **case)
        ignored = ["lm_head", "re:.*\\.gate$"]
        return made.tensors, made.decompressed(), made.stated(ignore=ignored)

    return quantized


def _fp8(high: int, wide: int) -> Callable[[torch.Tensor], Quantized]:
    """In blocks as DeepSeek's, of another size."""

    def quantized(weight: torch.Tensor) -> Quantized:
        made = Compressed(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [high, wide]},
            format="float-quantized",
            scale_dtype=torch.float32,
            weight=weight,
        )
        tensors = {"weight": made.tensors["weight"], "weight_scale_inv": made.tensors["weight_scale"]}
        stated = {"quant_method": "fp8", "weight_block_size": [high, wide], "activation_scheme": "dynamic"}
        return tensors, made.decompressed(), stated

    return quantized


def _fp8_by_tensor(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    stated = {"quant_method": "fp8", "activation_scheme": "static"}
    tensors = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
    return tensors, numbers.float() * scale, stated


_W4 = {"num_bits": 4, "group_size": 32}
_FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
_MXFP4 = {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}

METHODS: dict[str, Callable[[torch.Tensor], Quantized]] = {
    "W4A16": _compressed(weights=_W4),
    "W4A16 asymmetric": _compressed(weights={**_W4, "symmetric": False}),
    "W3A16": _compressed(weights={**_W4, "num_bits": 3}),
    "W8A8": _compressed(
        weights={"num_bits": 8, "strategy": "channel"},
        inputs={"num_bits": 8, "strategy": "token", "dynamic": True},
        format="int-quantized",
    ),
    "FP8 rows": _compressed(weights=_FP8_ROWS, format="float-quantized"),
    "MXFP4": _compressed(weights=_MXFP4, format="mxfp4-pack-quantized"),
    "FP8 blocks": _fp8(32, 16),
    "FP8 large blocks": _fp8(128, 128),
    "FP8 tensors": _fp8_by_tensor,
}

#: All of Llama; of other families what differs.
CASES = [
    *(("llama", method) for method in METHODS),
    *((family, method) for family in ("phi3", "mixtral") for method in ("W4A16 asymmetric", "FP8 tensors")),
    *(("deepseek_v3", method) for method in ("FP8 blocks", "FP8 large blocks", "W4A16")),
    *(("llama tied", "W4A16"), ("qwen2", "W8A8")),
]


@dataclass
class Pair:
    """A quantized checkpoint, and one of the numbers that it means.

    Attributes:
        matrices: bytes of what was quantized, as files hold it.
    """

    quantized: Path
    numbers: Path
    matrices: int = field(default=0)


def _save(folder: Path, tokenizer: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Callable[[str, str], Pair]:
    sources = dict[str, Path]()

    def make(family: str, method: str) -> Pair:
        folder = tmp_path_factory.mktemp("pair")
        if family not in sources:
            torch.manual_seed(0)
            options = FAMILIES[family]
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family.split()[0]](**options)).float()
            sources[family] = tmp_path_factory.mktemp("source")
            model.save_pretrained(sources[family])
        config = json.loads((sources[family] / "config.json").read_text()) | {"dtype": "float32"}
        numbers, quantized, stated, matrices = dict[str, torch.Tensor](), dict[str, torch.Tensor](), {}, 0
        for name, tensor in load_file(sources[family] / "model.safetensors").items():
            if tensor.dim() != 2 or _NUMBERS.search(name):
                numbers[name] = quantized[name] = tensor
                continue
            parts, numbers[name], stated = METHODS[method](tensor)
            module = name.removesuffix(".weight")
            quantized |= {f"{module}.{part}": found for part, found in parts.items()}
            matrices += sum(part.numel() * part.itemsize for part in parts.values())
        return Pair(
            _save(folder / "quantized", tiny_llama, {**config, "quantization_config": stated}, quantized),
            _save(folder / "numbers", tiny_llama, config, numbers),
            matrices,
        )

    return make


_PROMPTS = [[5, 6, 7], [11, 200, 3, 17, 90, 41, 8, 150, 33], [2]]


def _answers(folder: Path, **options: Any) -> list[tuple[list[int], list[float]]]:
    llm = LLM(str(folder), max_model_len=128, num_gpu_blocks_override=64, dtype="float32", **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    outputs = [each.outputs[0] for each in llm.generate(_PROMPTS, params, use_tqdm=False)]
    return [
        (list(output.token_ids), [next(iter(each.values())).logprob for each in output.logprobs or []])
        for output in outputs
    ]


@pytest.mark.parametrize(("family", "method"), CASES)
def test_quantized_models_answer_as_their_numbers(
    family: str, method: str, pair_of: Callable[[str, str], Pair]
) -> None:
    pair = pair_of(family, method)
    assert _answers(pair.quantized) == _answers(pair.numbers)
