"""A model that loads in seconds: a random Llama of 130 kB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.cluster import Object


def tiny_llama(folder: Path, **shape: int) -> dict[str, bytes]:
    """Write the model into `folder`, and return its files.

    Args:
        shape: changed fields of its configuration.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    letters = {"<s>": 0, "</s>": 1} | {
        letter: 2 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    usual: dict[str, Any] = {
        "vocab_size": len(letters), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**usual | shape)).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tiny(hub: str, name: str = "demo", source: str = "hf://org/model", **spec: Any) -> Object:
    """Return an endpoint of the tiny model from `hub`."""
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceEndpoint",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": source},
            "hardware": {
                "accelerator": "cpu",
                "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
            },
            "engine": {"env": [{"name": "HF_ENDPOINT", "value": hub}], "args": ["--num-gpu-blocks-override=256"]},
            **spec,
        },
    }
