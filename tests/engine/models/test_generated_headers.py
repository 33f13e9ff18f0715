"""Generated GGUF headers: families × block types, mixed like llama.cpp does. Sizes of weights and of the KV cache are
counted independently, by the gguf library and by transformers' config.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from stoker_engine.architectures.stored_formats import GGUF_FORMATS
from stoker_engine.kernels.cpu.library import cpu_library
from stoker_engine.models.decoder_loader import DecoderLoader
from stoker_engine.models.gguf.gguf_file import GGUFFile
from stoker_engine.sizing.weight_sizes import weight_bytes

from ...support.engine.tiny_configs import GGUF
from . import llama_cpp

#: Types for rows that are multiples of 256, and llama.cpp's replacements for other rows.
LARGE: Final = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XS")
SMALL: Final = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4")
#: Random sizes by the tiny models' sizes.
WIDER: Final = {
    "hidden_size": 512, "n_embd": 512, "d_model": 512, "intermediate_size": 1280, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512, "kv_lora_rank": 256, "q_lora_rank": 256, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 128,
}  # fmt: skip
#: Families whose heads are always tied to the embedding, or never.
ALWAYS: Final = ("dbrx", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2")


class Generated:
    """A seeded random header."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        kind, options = GGUF[draw.choice(list(GGUF))]
        scale = draw.choice([1, 2])
        sizes = {name: WIDER.get(name, value) for name, value in options.items()}
        for name in ("hidden_size", "n_embd", "d_model", "intermediate_size"):
            if name in sizes:
                sizes[name] *= scale
        if "ffn_config" in sizes:
            sizes["ffn_config"] = {**sizes["ffn_config"], "ffn_hidden_size": 512}
        tied = draw.random() < 0.5
        if kind not in ALWAYS:
            sizes["tie_word_embeddings"] = tied
        ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
        with torch.device("meta"):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                CONFIG_MAPPING[kind](**{"vocab_size": 512 * draw.randint(1, 8), **ends, **sizes})
            )
        self.main_type, self.other_type = draw.choice(LARGE + SMALL), draw.choice(LARGE + SMALL)
        named = llama_cpp.named_tensors(self.model, llama_cpp.ARCHITECTURES[kind])
        self.tensors: dict[str, torch.Tensor] = dict(named)
        self.types = {name: self._type(name, tensor) for name, tensor in self.tensors.items()}

    def _type(self, name: str, tensor: torch.Tensor) -> GGMLQuantizationType:
        """Choose as llama.cpp: one type for most matrices, another for some, none for rows without whole blocks."""
        if llama_cpp.is_plain(name, tensor):
            return GGMLQuantizationType.F32
        preferred = self.other_type if "down" in name or name.startswith(("output.", "token_embd.")) else self.main_type
        for kind in (preferred, self._draw.choice(SMALL), "F16"):
            if tensor.shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0:
                return GGMLQuantizationType[kind]
        raise AssertionError(name)

    def counted(self) -> float:
        """Return the bytes of the weights in bfloat16; blocks of types with kernels stay."""
        total = 0
        for name, tensor in self.tensors.items():
            kind = self.types[name]
            block, size = GGML_QUANT_SIZES[kind]
            # Latent attention transposes attn_k_b.
            stays = kind.name in GGUF_FORMATS and block > 1 and "attn_k_b" not in name
            total += tensor.numel() // block * size if stays else 2 * tensor.numel()
        return total


def cached(config: Any) -> int:
    """Return the elements of keys and values per token, over all layers."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config.model_type == "falcon":
        heads = config.num_kv_heads if config.new_decoder_architecture else 1
    if config.model_type == "dbrx":
        heads = config.attn_config.kv_n_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size)


@pytest.mark.parametrize("seed", range(24))
def test_planned_sizes_equal_those_of_the_tensors(seed: int, tmp_path: Path) -> None:
    if cpu_library(torch.device("cpu"), torch.bfloat16) is None:
        pytest.skip("no kernels for blocks on this machine")
    generated = Generated(seed)
    file = GGUFFile(llama_cpp.write_header(generated.model, tmp_path / "model.gguf", generated.types))
    config = file.config()
    formats = DecoderLoader(file.weight_names(), file).weight_formats(config, torch.bfloat16, torch.device("cpu"))
    case = (generated.model.config.model_type, generated.main_type, generated.other_type)
    assert sum(layer.attention.cache.numbers_per_token for layer in config.layers) == cached(generated.model.config), (
        case
    )
    assert weight_bytes(config, 2, formats=formats) == pytest.approx(generated.counted(), rel=0.01), case
