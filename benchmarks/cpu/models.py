"""The models: Hugging Face folders with bfloat16 weights, from which all engines start, and GGUF files
and quantized folders made from them.

Other engines' environments import this file, so importing it requires only Python.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cpu.environments import CannotRunError, Step, once

SHAPES: Final = {
    "A": "SmolLM2-135M's shape, random weights",
    "B": "Qwen2.5-0.5B's shape, random weights",
    "gemma": "Gemma 3 270M, the demo model's weights",
}

#: Weight formats by llama.cpp's or compressed-tensors' name: description, with OpenVINO's nearest format.
WEIGHTS: Final = {
    "bf16": "bfloat16",
    "q8_0": "8 bits (GGUF's Q8_0; OpenVINO's int8)",
    "q4_k_m": "4 bits for the most part (GGUF's Q4_K_M; OpenVINO's int4)",
    "w8a8": "8 bits by rows (compressed-tensors' W8A8; OpenVINO's int8)",
}

#: Models by name (``A``, ``A-q8_0``): description.
MODELS: Final = {
    shape if weights == "bf16" else f"{shape}-{weights}": f"{description}, {stored}"
    for weights, stored in WEIGHTS.items()
    for shape, description in SHAPES.items()
}


@dataclass(frozen=True)
class Model:
    """A prepared model.

    Attributes:
        folder: weights, configuration and tokenizer, in bfloat16.
        body: number of parameters used for every token.
        head: number of parameters used only for tokens that are sampled from: the matrix of the logits.
        weight_bytes: bytes of weights that a step reads at least.
        context: longest sequence of the model, in tokens.
        file: GGUF file or folder of quantized weights.
    """

    name: str
    folder: Path
    body: int
    head: int
    weight_bytes: int
    context: int
    file: Path | None = None

    @property
    def weights(self) -> str:
        """Return the weight format, one of `WEIGHTS`."""
        return self.name.partition("-")[2] or "bf16"

    def folder_alone(self, engine: str) -> Path:
        """Return the folder for an `engine` that loads only bfloat16. Raises `CannotRunError` for other weights."""
        if self.file is None:
            return self.folder
        raise CannotRunError(f"{engine} was not tried with quantized weights on CPUs")


def prepare(name: str, cache: Path) -> Model:
    """Prepare a model's files in `cache` on first use. Child processes do it, so that their memory is released.

    Raises:
        CannotRunError: the files cannot be prepared.
    """
    shape, _, weights = name.partition("-")

    def make(folder: Path, step: Step) -> None:
        step(f"model {shape}", [sys.executable, "-m", "cpu.models", shape, str(folder)])

    folder = once(cache / "models" / shape, f"{SHAPES[shape]}, 2", make)
    body, head = parameters(folder)
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    if not weights:
        return Model(name, folder, body, head, 2 * (body + head), context)
    if weights == "w8a8":

        def quantize(target: Path, step: Step) -> None:
            command = [sys.executable, "-m", "stoker", "quantize", str(folder), "--to", "W8A8"]
            step(f"model {shape} in W8A8", [*command, "--output", str(target / "model")])

        quantized = once(cache / "models" / name, "W8A8", quantize) / "model"
        read = sum(parameters(quantized, bytes_of))
        return Model(name, folder, body, head, read, context, quantized)
    from cpu.gguf import gguf_file

    file = gguf_file(shape, weights, folder, cache)
    return Model(name, folder, body, head, bytes_read(file), context, file)


def count_of(tensor: dict[str, Any]) -> int:
    """Return the number of elements of a tensor in a safetensors file."""
    return math.prod(tensor["shape"])


def bytes_of(tensor: dict[str, Any]) -> int:
    """Return the bytes of a tensor in a safetensors file."""
    begin, end = tensor["data_offsets"]
    return int(end - begin)


def parameters(folder: Path, size_of: Callable[[dict[str, Any]], int] = count_of) -> tuple[int, int]:
    """Return the size of a folder's body and of its head.

    An embedding that is not the head counts as neither, because only single rows of it are read.
    """
    sizes: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as read:
            header = json.loads(read.read(int.from_bytes(read.read(8), "little")))
        header.pop("__metadata__", None)
        sizes |= {name: size_of(tensor) for name, tensor in header.items()}
    embedding = sum(sizes.pop(name) for name in [*sizes] if name.endswith("embed_tokens.weight"))
    head = sum(sizes.pop(name) for name in [*sizes] if name.endswith("lm_head.weight"))
    return sum(sizes.values()), head or embedding


def bytes_read(file: Path) -> int:
    """Return the bytes of a GGUF file's weights, without an embedding that is not the head."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}
    embedding = sizes.pop("token_embd.weight", 0)
    return sum(sizes.values()) + (0 if "output.weight" in sizes else embedding)


def write(name: str, folder: Path) -> None:
    """Write a model into `folder`."""
    if name == "gemma":
        _dequantize_demo(folder)
    else:
        from random_models import random_model

        shutil.copytree(random_model(name), folder, dirs_exist_ok=True)


def _dequantize_demo(folder: Path) -> None:
    """Write the weights of the demo model, a quantized GGUF file, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from stoker_engine.models.hub.demo import demo_model

    file = demo_model("gemma-3-270m")
    in_numbers = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=in_numbers
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
