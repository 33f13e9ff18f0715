"""What this machine has, as far as a command can find out without a GPU library."""

from __future__ import annotations

import shutil
import subprocess

from stoker_operator.plan.catalogue import Accelerator


def lacks(key: str, accelerator: Accelerator, count: int) -> str | None:
    """Why this machine cannot stand in for `count` of `accelerator`; None where it can.

    Any accelerator of the same maker with at least the memory will do: what is planned for the smaller one holds
    on it. Only NVIDIA's can be queried.
    """
    if accelerator.resource is None:
        return None
    if accelerator.resource != "nvidia.com/gpu":
        return f"whether this machine has {key} is not known"
    found = nvidia_memory()
    fit = [memory for memory in found if memory >= (accelerator.memory_mib or 0)]
    if len(fit) >= count:
        return None
    has = ", ".join(f"{memory:,} MiB" for memory in found)
    return f"this machine lacks {count} × {key}: it has {f'GPUs of {has}' if found else 'no NVIDIA GPU'}"


def nvidia_memory() -> list[int]:
    """MiB of each NVIDIA GPU, as the driver reports them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    return [int(line) for line in result.stdout.split() if line.isdigit()] if result.returncode == 0 else []
