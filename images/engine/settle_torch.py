"""Make the torch of this Python environment the one an image needs, or say why it is not.

python settle_torch.py cpu|cuda|rocm

A torch that was built for another kind of GPU would install as well, and fail only when it serves: it is
refused here. For CPUs any torch will do, and what one built for CUDA brings along and never needs there is removed:

`libtorch_cuda.so` is linked against a dozen CUDA libraries, so the dynamic loader maps them even where there is no GPU,
and they must stay, but hollow (see `hollow.py`). What is left of NVIDIA's packages is opened only by name and only with
a GPU: cuDNN's parts, NCCL's tools, static libraries. What is mapped is seen from `import torch` itself, so the rule
survives new versions of torch.
A torch that was built for CPUs has none of this and is left as it is.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from pathlib import Path

from hollow import hollow

#: Bytes. Smaller ones may have functions that are called without a GPU: the CUDA runtime says there that there is none.
LARGE = 16 << 20

IMPORT_AND_LIST_MAPS = """
import torch, torch.distributed
torch.randn(8, 8) @ torch.randn(8, 8)
print(open("/proc/self/maps").read())
"""


def problem(device: str, *, cuda: str | None, hip: str | None) -> str:
    """Why a torch cannot serve on `device`; empty if it can.

    Args:
        device: cpu, cuda or rocm.
        cuda: the version of CUDA that torch was built for (`torch.version.cuda`).
        hip: the version of HIP, ROCm's CUDA, that torch was built for (`torch.version.hip`).
    """
    if device not in ("cpu", "cuda", "rocm"):
        return f"DEVICE is {device!r}; cpu, cuda and rocm are known"
    if device == "cpu" or (cuda if device == "cuda" else hip):
        return ""
    built_for = f"CUDA {cuda}" if cuda else f"ROCm (HIP {hip})" if hip else "CPUs"
    return f"this torch is built for {built_for}, not for {device}: let TORCH_INDEX_URL name an index of those that are"


def prune(packages: Path) -> None:
    """Removes from the folder of packages what is of no use without a GPU."""
    before = size(packages)
    needed = mapped_files()
    for file in packages.glob("nvidia/**/*"):
        if not file.is_file() or file.suffix == ".py":
            continue
        if file.resolve() not in needed:
            file.unlink()
        elif file.stat().st_size >= LARGE:
            hollow(file.resolve())
    for unused in (
        "triton",  # compiles kernels for GPUs; its metadata stays, or pip would install it again
        "torch/include",  # for compiling C++ extensions
        "torch/share",
    ):
        shutil.rmtree(packages / unused, ignore_errors=True)
    mapped_files()  # it still imports
    print(f"pruned {before} MB to {size(packages)} MB")


def mapped_files() -> set[Path]:
    """The files that a process maps once it has imported torch and multiplied."""
    maps = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST_MAPS], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return {Path(fields[5]).resolve() for line in maps.split("\n") if len(fields := line.split(maxsplit=5)) > 5}


def size(folder: Path) -> int:
    """MiB of the files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) >> 20


def main() -> None:
    import torch

    (device,) = sys.argv[1:]
    wrong = problem(device, cuda=torch.version.cuda, hip=torch.version.hip)
    if wrong:
        sys.exit(wrong)
    if device == "cpu":
        prune(Path(site.getsitepackages()[0]))


if __name__ == "__main__":
    main()
