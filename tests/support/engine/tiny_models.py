"""Tiny random models of transformers, saved as checkpoints.

Weights have a large standard deviation (0.3 instead of 0.02), so that the two best logits are rarely close. Norms and
biases are random too, since ones and zeros hide errors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from .tiny_configs import FAMILIES, GGUF, LLAMA_SIZES, MIXTURES, VOCABULARY


def random_model(model_type: str, options: dict[str, Any], std: float | None = None) -> PreTrainedModel:
    """Return a model of this type and config in float32, the same for each call.

    Args:
        std: standard deviation of the weights; default 0.3, for DBRX 0.1, since its float32 error would otherwise be
        1e-4.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, **options})
    # transformers' eager Falcon adds ALiBi twice, once with the mask; its sdpa Gemma 2 ignores the soft cap.
    implementation = "sdpa" if model_type == "falcon" else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return randomized(model, std or (0.1 if model_type == "dbrx" else 0.3))


def randomized(model: PreTrainedModel, std: float = 0.3) -> PreTrainedModel:
    """Randomize the parameters of `model` in float32; norm weights and biases are drawn around their values."""
    model = model.float().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * std + (parameter.data if parameter.dim() == 1 else 0)
    model.tie_weights()
    return model


def tiny_family(name: str) -> PreTrainedModel:
    """Return the model with that name in `FAMILIES`."""
    return random_model(*FAMILIES[name])


def tiny_mixture(name: str) -> PreTrainedModel:
    """Return the model with that name in `MIXTURES`; the correction bias of experts' scores is random too."""
    model = random_model(*MIXTURES[name])
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


def tiny_gguf(name: str) -> PreTrainedModel:
    """Return the model with that name in `GGUF`, for `llama_cpp` to write."""
    return random_model(*GGUF[name])


def tiny_llama_model(**overrides: Any) -> LlamaForCausalLM:
    """Return a random Llama with two layers and grouped KV heads."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA_SIZES, **overrides})).float().eval()


def tiny_gemma3_model(**overrides: Any) -> Gemma3ForCausalLM:
    """Return a random Gemma 3 with local and global layers and a short window."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in LLAMA_SIZES.items() if key not in ("bos_token_id", "eos_token_id")}
    config = Gemma3TextConfig(
        **{
            **sizes,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            **overrides,
        }
    )
    return Gemma3ForCausalLM(config).float().eval()


def save_model(folder: Path, model: PreTrainedModel) -> Path:
    """Save `model` and a tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Train a small byte-level BPE tokenizer and save it in `folder`."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LLAMA_SIZES["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog, again and again"] * 8, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def prompts(count: int = 4) -> list[list[int]]:
    """Return prompts of several lengths, some longer than the windows of `FAMILIES`."""
    rng = random.Random(1)
    return [[rng.randrange(2, VOCABULARY) for _ in range(length)] for length in (61, 9, 30, 1)[:count]]


def reference_of(theirs: PreTrainedModel) -> Callable[[list[int]], torch.Tensor]:
    """Return a function for the model's logits [tokens, vocabulary] of one sequence."""

    def reference(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = theirs(torch.tensor([tokens])).logits[0]
        return logits

    return reference
