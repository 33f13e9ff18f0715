"""Stoker's offline API, from this repository."""

from __future__ import annotations

import sys
from pathlib import Path

from cpu.engines.child import Worker
from cpu.engines.engine import KV_CACHE_BYTES, Running
from cpu.engines.worker import Generate
from cpu.models import Model
from cpu.workloads import Room

name = "stoker"


def start(model: Model, room: Room, cache: Path) -> Running:
    """See `Engine.start`."""
    log = cache / "logs" / f"{name}-{model.name}.log"
    return Worker(sys.executable, __name__, model.file or model.folder, room, log)


def load(folder: Path, longest: int, cpus: int) -> tuple[str, Generate]:
    """See `worker`."""
    from stoker_engine import LLM, SamplingParams

    llm = LLM(str(folder), dtype="bfloat16", kv_cache_memory_bytes=KV_CACHE_BYTES)

    def generate(requests: list[tuple[list[int], int]]) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=out, ignore_eos=True) for _, out in requests]
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return "this repository's", generate
