"""transformers' ``generate``, in the project's own environment.

It pads a batch on the left to the longest prompt and generates as many tokens as the longest output needs. Only the
requested tokens count.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cpu.engines.child import Worker
from cpu.engines.engine import Running
from cpu.engines.worker import Generate
from cpu.models import Model
from cpu.workloads import Room

name = "transformers"


def start(model: Model, room: Room, cache: Path) -> Running:
    """See `Engine.start`."""
    log = cache / "logs" / f"{name}-{model.name}.log"
    return Worker(sys.executable, __name__, model.folder_alone(name), room, log)


def load(folder: Path, longest: int, cpus: int) -> tuple[str, Generate]:
    """See `worker`."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(requests: list[tuple[list[int], int]]) -> list[int]:
        prompts = [prompt for prompt, _ in requests]
        longest, max_new_tokens = max(map(len, prompts)), max(out for _, out in requests)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            got = model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=max_new_tokens, max_new_tokens=max_new_tokens
            )
        return [min(got.shape[1] - longest, out) for _, out in requests]

    return transformers.__version__, generate
