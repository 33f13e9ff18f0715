"""Finds this machine's NVIDIA GPUs, without a GPU library."""

from __future__ import annotations

import shutil
import subprocess

from stoker_operator.plan.catalogue import Accelerator


def lacks(key: str, accelerator: Accelerator, count: int) -> str | None:
    """Return why this machine cannot run a plan for `count` accelerators of a kind, or why this is unknown; None if it
    can.

    NVIDIA GPUs with at least as much memory are sufficient; other accelerators cannot be queried.

    Args:
        key: the kind's key in the catalogue.
        accelerator: the kind.
        count: number of accelerators in the plan.
    """
    if accelerator.resource is None:
        return None
    if accelerator.resource != "nvidia.com/gpu":
        return f"it is unknown whether this machine has {key}"
    found = nvidia_memory()
    fit = [memory for memory in found if memory >= (accelerator.memory_mib or 0)]
    if len(fit) >= count:
        return None
    has = ", ".join(f"{memory:,} MiB" for memory in found)
    return f"this machine lacks {count} × {key}: it has {f'GPUs of {has}' if found else 'no NVIDIA GPU'}"


def nvidia_memory() -> list[int]:
    """Return the memory in MiB of each NVIDIA GPU for which nvidia-smi reports it; empty if that fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    return [int(line) for line in result.stdout.split() if line.isdigit()] if result.returncode == 0 else []
