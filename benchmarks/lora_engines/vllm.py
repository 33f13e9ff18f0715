"""vLLM's offline API with adapters."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from cpu.engines.worker import Generate

from lora_engines import adapter_folders, rank


def load(folder: Path, longest: int, cpus: int) -> tuple[str, Generate]:
    """See `cpu.engines.worker`."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{cpus - 1}"
    vllm: Any = importlib.import_module("vllm")  # type checkers confuse it with e2e/vllm
    request: Any = importlib.import_module("vllm.lora.request").LoRARequest
    adapters = [request(f"a{index}", index + 1, path) for index, path in enumerate(adapter_folders())]
    llm = vllm.LLM(
        str(folder), dtype="bfloat16", max_model_len=longest, max_num_seqs=64, enable_lora=True,
        max_loras=len(adapters), max_lora_rank=rank(),
    )  # fmt: skip

    def generate(requests: list[tuple[list[int], int]]) -> list[int]:
        params = [vllm.SamplingParams(temperature=0, max_tokens=out, ignore_eos=True) for _, out in requests]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        used = [adapters[index % len(adapters)] for index in range(len(requests))]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=used)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return vllm.__version__, generate
