"""Quantized checkpoints with dequantized equivalents, and engines' outputs for both."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from stoker_engine import LLM, SamplingParams
from stoker_engine.attention.select import attention_backend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels import select
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.served import served
from ...support.engine.tiny_configs import BLOCK_SIZES
from .quantize import METHODS, quantize_each

SIZES: dict[str, Any] = {
    **BLOCK_SIZES,
    "vocab_size": 320,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "llama wide": {**SIZES, "intermediate_size": 128},
    "llama tied": {**SIZES, "tie_word_embeddings": True},
    "qwen2": SIZES,
    "phi3": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "granitemoe": {**SIZES, "num_local_experts": 4},  # stacks, by the names of modules
    "deepseek_v3": {
        **SIZES,
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

PROMPTS = [[5, 6, 7], [11, 200, 3, 17, 90, 41, 8, 150, 33], [2]]

#: Tensors that stay unquantized.
_UNQUANTIZED = re.compile(r"norm|embed_tokens|lm_head|mlp\.gate\.weight|block_sparse_moe\.gate\.weight|router|bias")

#: All methods for Llama; for other families those that differ.
CASES = [
    *(("llama", method) for method in METHODS if method != "FP8 blocks of 128"),
    *((family, method) for family in ("phi3", "mixtral") for method in ("W4A16 asymmetric", "FP8 tensors")),
    *(("deepseek_v3", method) for method in ("FP8 blocks", "FP8 large blocks", "W4A16")),
    *(("llama tied", "W4A16"), ("llama tied", "embedding and head"), ("qwen2", "W8A8")),
    *(("mixtral", "W4A16 in order of groups"), ("granitemoe", "FP8 blocks")),
]

Answers = list[tuple[list[int], list[float]]]


@dataclass
class Pair:
    """A quantized checkpoint, and its dequantized equivalent.

    Attributes:
        codes, scales: bytes of the quantized parts in the files.
    """

    quantized: Path
    dequantized: Path
    codes: int
    scales: int


def source_model(family: str) -> PreTrainedModel:
    """Return the model whose matrices are quantized."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family.split()[0]](**FAMILIES[family]))
    return model.float()


def make_pair(family: str, method: str, folder: Path, source: Path, tokenizer: Path) -> Pair:
    """Quantize the model in `source` by a method of `METHODS`.

    Args:
        folder: folder for both checkpoints.
        tokenizer: folder of a model whose tokenizer both get.
    """
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    dequantized, quantized, stated = dict[str, torch.Tensor](), dict[str, torch.Tensor](), {}
    codes, scales = 0, 0
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 1 or (_UNQUANTIZED.search(name) and method != "embedding and head"):
            dequantized[name] = quantized[name] = tensor
            continue
        parts, dequantized[name], stated = quantize_each(METHODS[method], tensor)
        module = name.removesuffix(".weight")
        quantized |= {f"{module}.{part}": found for part, found in parts.items()}
        codes += sum(part.nbytes for end, part in parts.items() if end in ("weight", "weight_packed"))
        scales += sum(part.nbytes for end, part in parts.items() if end in ("weight_scale", "weight_scale_inv"))
    return Pair(
        save_checkpoint(folder / "quantized", tokenizer, {**config, "quantization_config": stated}, quantized),
        save_checkpoint(folder / "dequantized", tokenizer, config, dequantized),
        codes,
        scales,
    )


def save_checkpoint(folder: Path, tokenizer: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Save a checkpoint with another model's tokenizer."""
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answers_of(folder: Path, **options: Any) -> Answers:
    """Return greedy outputs for `PROMPTS`: tokens, and each token's log-probability."""
    llm = LLM(str(folder), max_model_len=128, num_gpu_blocks_override=64, dtype="float32", **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [
        (list(output.token_ids), [next(iter(each.values())).logprob for each in output.logprobs or []])
        for output in outputs
    ]


def assert_close(answers: Answers, expected: Answers) -> None:
    for (tokens, logprobs), (their_tokens, theirs) in zip(answers, expected, strict=True):
        assert tokens == their_tokens
        assert logprobs == pytest.approx(theirs, abs=1e-4)


def load_decoder(folder: Path, ranks: Communicator | None = None) -> tuple[Decoder, int]:
    """Return the model, or one rank's shard, and the planned bytes of its weights."""
    checkpoint, cpu, dtype = find_checkpoint(EngineArgs(str(folder))), torch.device("cpu"), torch.float32
    build = Build(
        dtype, attention_backend(cpu, served(dtype)), select.select_kernels(cpu, dtype), ranks or SingleRank()
    )
    model = checkpoint.load(build, cpu, 128)
    assert isinstance(model, Decoder)
    formats = checkpoint.weight_formats(dtype, cpu)
    return model, weight_bytes(checkpoint.config, dtype.itemsize, formats=formats)
