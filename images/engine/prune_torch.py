"""Remove from this Python environment what a torch built for CUDA brings along and never needs on a CPU.

`libtorch_cuda.so` is linked against a dozen CUDA libraries, so the dynamic loader maps them even where there is no GPU,
and they must stay. What is left of NVIDIA's packages is opened only by name and only with a GPU: cuDNN's parts, NCCL's
tools, static libraries. What is mapped is seen from `import torch` itself, so the rule survives new versions of torch.
A torch that was built for CPUs has none of this and is left as it is.
"""

import shutil
import site
import subprocess
import sys
from pathlib import Path

packages = Path(site.getsitepackages()[0])

IMPORT_AND_LIST_MAPS = """
import torch, torch.distributed
torch.randn(8, 8) @ torch.randn(8, 8)
print(open("/proc/self/maps").read())
"""


def mapped_files() -> set[Path]:
    maps = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST_MAPS], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return {Path(fields[5]).resolve() for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) > 5}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) >> 20


before = size(packages)
needed = mapped_files()
for file in packages.glob("nvidia/**/*"):
    if file.is_file() and file.suffix != ".py" and file.resolve() not in needed:
        file.unlink()
for unused in (
    "triton",  # compiles kernels for GPUs; its metadata stays, or pip would install it again
    "torch/include",  # for compiling C++ extensions
    "torch/share",
):
    shutil.rmtree(packages / unused, ignore_errors=True)
mapped_files()  # it still imports
print(f"pruned {before} MB to {size(packages)} MB")
