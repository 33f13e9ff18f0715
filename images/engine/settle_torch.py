"""Check that the torch of this Python environment supports a device, and remove parts that the device does not need.

python settle_torch.py cpu|cuda|rocm

A torch built for another kind of GPU could be installed, and would fail only when the engine serves, so it is rejected
here. The device cpu supports any torch; from one built for CUDA the parts that are not needed on a CPU are removed:

`libtorch_cuda.so` is linked against a dozen CUDA libraries, so the dynamic loader maps them even without a GPU. They
must stay, but are made hollow (see `hollow.py`). The other files of NVIDIA's packages are only opened by name, and only
with a GPU: cuDNN's parts, NCCL's tools, static libraries. The mapped files are determined by `import torch` itself, so
that the rule also holds for new versions of torch.
A torch built for CPUs has none of these files and stays unchanged.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from pathlib import Path

from hollow import hollow

#: Smallest library that is made hollow, in bytes. Functions of smaller ones, such as the CUDA runtime, may be called
#: without a GPU, for example to detect that there is none.
LARGE = 16 << 20

IMPORT_AND_LIST_MAPS = """
import torch, torch.distributed
torch.randn(8, 8) @ torch.randn(8, 8)
print(open("/proc/self/maps").read())
"""


def problem(device: str, *, cuda: str | None, hip: str | None) -> str:
    """Return why a torch cannot be used on `device`; empty if it can.

    Args:
        device: cpu, cuda or rocm.
        cuda: version of CUDA that torch was built for (`torch.version.cuda`).
        hip: version of HIP, ROCm's CUDA, that torch was built for (`torch.version.hip`).
    """
    if device not in ("cpu", "cuda", "rocm"):
        return f"DEVICE is {device!r}; use cpu, cuda or rocm"
    if device == "cpu" or (cuda if device == "cuda" else hip):
        return ""
    built_for = f"CUDA {cuda}" if cuda else f"ROCm (HIP {hip})" if hip else "CPUs"
    return (
        f"this torch is built for {built_for}, not for {device}; set TORCH_INDEX_URL to an index of torch for {device}"
    )


def prune(packages: Path) -> None:
    """Remove files from the folder of packages that are not used without a GPU."""
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
        "triton",  # compiles kernels for GPUs; its metadata stays, otherwise pip would reinstall it
        "torch/include",  # for compiling C++ extensions
        "torch/share",
    ):
        shutil.rmtree(packages / unused, ignore_errors=True)
    mapped_files()  # fails if torch can no longer be imported
    print(f"pruned {before} MB to {size(packages)} MB")


def mapped_files() -> set[Path]:
    """Return the files that a process has mapped after it has imported torch and multiplied matrices."""
    maps = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST_MAPS], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return {Path(fields[5]).resolve() for line in maps.split("\n") if len(fields := line.split(maxsplit=5)) > 5}


def size(folder: Path) -> int:
    """Return the size of all files below a folder, in MiB."""
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
