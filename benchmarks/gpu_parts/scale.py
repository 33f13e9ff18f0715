"""What is measured on a device: models and workloads by the device's memory, or tiny ones that run anywhere."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Mixture:
    """Shape of a mixture of experts."""

    name: str
    hidden: int
    experts: int
    chosen: int
    intermediate: int
    layers: int


@dataclass(frozen=True)
class Attention:
    """Shape of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Scale:
    """Sizes of all measurements.

    Attributes:
        device: ``cuda`` or ``cpu``.
        big, small: names of models in `models.SHAPES`.
        copied: bytes of the copy that measures the bandwidth.
        gemm: size of the GEMM that measures the arithmetic.
        streams, context, tokens: decodes: numbers of sequences, tokens of their prompts, and tokens to generate.
        prompts: lengths of prompts, each computed in one step.
        nano: nano-vllm's benchmark: number of requests, and maximum tokens of prompts and outputs.
        sharegpt: number of ShareGPT-like requests, and maximum tokens of prompts and outputs.
        busy_streams: sequences that decode while the GPU's work is recorded.
        prefills, decodes: attention: lengths of prompts; sequences and their contexts.
        blocks: sizes of KV-cache blocks; the first one is the default.
        mixture_tokens: numbers of tokens in a step of the mixture.
        served: requests to the server: rate per second, number, tokens of prompts and outputs.
        options: options of all engines, as of `EngineArgs`.
    """

    device: str
    big: str
    small: str
    copied: int
    gemm: int
    streams: tuple[int, ...]
    context: int
    tokens: int
    prompts: tuple[int, ...]
    nano: tuple[int, int]
    sharegpt: tuple[int, int]
    busy_streams: int
    attention: Attention
    prefills: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    mixture: Mixture
    mixture_tokens: tuple[int, ...]
    served: tuple[float, int, int, int]
    options: dict[str, Any]

    @property
    def model_bytes(self) -> int:
        """Bytes of the models' files, about."""
        return 0 if self.device == "cpu" else {"Llama-3-8B": 18, "Llama-3.2-3B": 9}[self.big] * GIB


FULL = Scale(
    device="cuda",
    big="Llama-3-8B",
    small="Qwen3-0.6B",
    copied=1 << 30,
    gemm=8192,
    streams=(1, 8, 64, 256),
    context=512,
    tokens=128,
    prompts=(2048, 8192),
    nano=(256, 1024),
    sharegpt=(1000, 1024),
    busy_streams=256,
    attention=Attention(32, 8, 128),
    prefills=(2048, 8192, 32768),
    decodes=((1, 32768), (8, 8192), (64, 2048)),
    blocks=(16, 64, 128),
    mixture=Mixture("Qwen3-30B-A3B", 2048, 128, 8, 768, 48),
    mixture_tokens=(1, 64, 2048),
    served=(16, 256, 512, 128),
    options={"max_model_len": 16384},
)

#: For GPUs and file systems with little room.
SMALL = replace(FULL, big="Llama-3.2-3B", streams=(1, 8, 64), busy_streams=64, sharegpt=(500, 1024))

#: Runs all parts in a minute on any machine; its values mean nothing.
TINY = Scale(
    device="cpu",
    big="tiny-Llama",
    small="tiny-Qwen3",
    copied=1 << 20,
    gemm=128,
    streams=(1, 3),
    context=8,
    tokens=8,
    prompts=(16, 32),
    nano=(4, 110),
    sharegpt=(5, 24),
    busy_streams=3,
    attention=Attention(4, 2, 32),
    prefills=(48, 96),
    decodes=((1, 70), (3, 33)),
    blocks=(16, 64),
    mixture=Mixture("tiny", 64, 8, 2, 32, 3),
    mixture_tokens=(1, 5),
    served=(20, 4, 8, 4),
    options={"max_model_len": 256, "num_gpu_blocks_override": 200, "max_num_seqs": 4, "max_num_batched_tokens": 64},
)


def scale_for(memory_bytes: int) -> Scale:
    """Return the scale for a GPU with this memory."""
    return FULL if memory_bytes >= 36 * GIB else SMALL


def model_folder(scale: Scale) -> Path:
    """Return a folder with room for the models: in memory if possible."""
    for folder in (Path("/dev/shm"), Path("/tmp")):
        if folder.is_dir() and shutil.disk_usage(folder).free > 1.1 * scale.model_bytes:
            return folder
    raise SystemExit(f"the models need {scale.model_bytes / GIB:.0f} GiB in /dev/shm or /tmp; choose others by --scale")
