"""The models: known shapes with random weights. Speed does not depend on the weights' values."""

from __future__ import annotations

import torch
from random_models import byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from gpu_parts.context import Context
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.weight_sizes import weight_sizes

_LLAMA_3 = {"rope_type": "default", "rope_theta": 500000.0}

SHAPES: dict[str, PretrainedConfig] = {
    "Llama-3-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rope_parameters=_LLAMA_3,
        bos_token_id=0, eos_token_id=0,
    ),
    "Llama-3.2-3B": LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rope_parameters=_LLAMA_3,
        tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    ),
    "Qwen3-0.6B": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    ),
    "tiny-Llama": LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    ),
    "tiny-Qwen3": Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip

#: Format of the weights → least bits of an element: int4 has groups of 128 with a 16-bit scale.
BITS = {"bf16": 16.0, "int4": 4.125, "fp8": 8.0}


def make_models(context: Context) -> None:
    """Save both models in bfloat16. Nothing is measured."""
    for name in (context.scale.big, context.scale.small):
        folder = context.model(name)
        torch.manual_seed(0)
        with context.device:
            model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)


class Size:
    """What a step of a model reads and computes.

    Attributes:
        parameters: elements of the matrices of all layers.
        head: elements of the head.
        bytes_per_token: bytes of a token's keys and values in bfloat16.
    """

    def __init__(self, name: str) -> None:
        architecture = "Qwen3ForCausalLM" if isinstance(SHAPES[name], Qwen3Config) else "LlamaForCausalLM"
        config = ModelConfig.from_dict(SHAPES[name].to_dict() | {"architectures": [architecture], "dtype": "bfloat16"})
        self.parameters = sum(size.numbers for size in weight_sizes(config) if size.linear)
        self.head = config.vocab_size * config.hidden_size
        layers = [layer.attention for layer in config.layers]
        self.bytes_per_token = sum(2 * 2 * each.num_kv_heads * each.head_dim for each in layers)
        self._attended = sum(4 * each.num_heads * each.head_dim for each in layers)

    def weights(self, stored: str) -> float:
        """Return the bytes of the weights that a step reads: all except an embedding that is not also the head."""
        return self.parameters * BITS[stored] / 8 + 2 * self.head

    def flops(self, tokens: int, sampled: int, attended: int) -> float:
        """Return the operations for `tokens` tokens, of which `sampled` have logits, and which attend to `attended`
        keys in total."""
        return 2.0 * (self.parameters * tokens + self.head * sampled) + self._attended * attended

    def of_requests(self, requests: list[tuple[int, int]], steps: int) -> tuple[float, float]:
        """Return the least bytes and operations of requests of (prompt tokens, output tokens) in at least `steps`
        steps: the weights are read once per step, the keys and values of a request once for each of its outputs after
        the first."""
        read = flops = 0.0
        for prompt, output in requests:
            tokens = prompt + output - 1
            decoded = tokens * (tokens + 1) / 2 - prompt * (prompt + 1) / 2
            read += decoded * self.bytes_per_token
            flops += self.flops(tokens, output, tokens * (tokens + 1) // 2)
        return read + steps * self.weights("bf16"), flops
