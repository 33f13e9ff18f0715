"""The models, as folders in Hugging Face's format with bfloat16 weights, so that every engine starts from the same."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpu.environments import Step, once

#: Name → what it is.
MODELS: Final = {
    "A": "SmolLM2-135M's shape, random weights",
    "B": "Qwen2.5-0.5B's shape, random weights",
    "gemma": "Gemma 3 270M, the demo model's weights",
}


@dataclass(frozen=True)
class Model:
    """Attributes:
    folder: weights, configuration and tokenizer.
    body: parameters that every token goes through.
    head: parameters that only those tokens go through from which another is drawn: the matrix that gives the logits.
    """

    name: str
    folder: Path
    body: int
    head: int

    @property
    def weight_bytes(self) -> int:
        """What a step reads at least, in bfloat16."""
        return 2 * (self.body + self.head)


def prepare(name: str, cache: Path) -> Model:
    """Makes a model's folder in `cache` when it is first used. Another process does it: it leaves no memory behind."""

    def make(folder: Path, step: Step) -> None:
        step(f"model {name}", [sys.executable, "-m", "cpu.models", name, str(folder)])

    folder = once(cache / "models" / name, f"{MODELS[name]}, 1", make)
    return Model(name, folder, *parameters(folder))


def parameters(folder: Path) -> tuple[int, int]:
    """Of a folder's weights those of the body and those of the head; an embedding that is no head is neither, as only
    single rows of it are read."""
    sizes = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as read:
            header = json.loads(read.read(int.from_bytes(read.read(8), "little")))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            size = 1
            for extent in tensor["shape"]:
                size *= extent
            sizes[name] = size
    embedding = sum(sizes.pop(name) for name in [*sizes] if name.endswith("embed_tokens.weight"))
    head = sum(sizes.pop(name) for name in [*sizes] if name.endswith("lm_head.weight"))
    return sum(sizes.values()), head or embedding


def write(name: str, folder: Path) -> None:
    """Writes a model into `folder`."""
    if name == "gemma":
        _dequantize_demo(folder)
    else:
        from random_models import random_model

        shutil.copytree(random_model(name), folder, dirs_exist_ok=True)


def _dequantize_demo(folder: Path) -> None:
    """Writes the weights of the demo model, which is a quantized GGUF file, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from stoker_engine.models.demo import demo_model

    file = demo_model("gemma-3-270m")
    in_numbers = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=in_numbers
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
