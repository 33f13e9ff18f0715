"""Models of known shapes with random weights, generated on first use. Speed does not depend on the weights' values."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config

from stoker_engine.contract.cache_folder import cache_folder

SHAPES: dict[str, tuple[str, PretrainedConfig]] = {
    "A": (
        "SmolLM2-135M's shape",
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
    "B": (
        "Qwen2.5-0.5B's shape",
        Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
}


def random_model(name: str) -> Path:
    """Return the folder of model `name` (A or B) in bfloat16, in the cache folder; it is generated on first use."""
    folder = cache_folder() / "benchmarks" / f"random-{name}-2"  # incremented when the generated model changes
    if not (folder / "tokenizer.json").is_file():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SHAPES[name][1], dtype=torch.bfloat16).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte.

    Workloads are token ids, so it only has to exist. Its one merge is there because llama.cpp refuses a tokenizer
    without merges.
    """
    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
