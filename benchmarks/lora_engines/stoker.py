"""Stoker's offline API with adapters."""

from __future__ import annotations

from pathlib import Path

from cpu.engines.engine import KV_CACHE_BYTES
from cpu.engines.worker import Generate

from lora_engines import adapter_folders, rank


def load(folder: Path, longest: int, cpus: int) -> tuple[str, Generate]:
    """See `cpu.engines.worker`."""
    from stoker_engine import LLM, LoRARequest, SamplingParams

    adapters = [LoRARequest(f"a{index}", index + 1, path) for index, path in enumerate(adapter_folders())]
    llm = LLM(
        str(folder), dtype="bfloat16", kv_cache_memory_bytes=KV_CACHE_BYTES, enable_lora=True,
        max_loras=len(adapters), max_lora_rank=rank(),
    )  # fmt: skip

    def generate(requests: list[tuple[list[int], int]]) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=out, ignore_eos=True) for _, out in requests]
        prompts = [prompt for prompt, _ in requests]
        used = [adapters[index % len(adapters)] for index in range(len(requests))]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=used)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return "this repository's", generate
