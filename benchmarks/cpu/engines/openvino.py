"""OpenVINO GenAI: its continuous-batching pipeline in bfloat16. Its KV cache has 8 bits by default.

It loads its own format, in 16, 8 or 4 bits. The converter has its own environment, because it needs an older
transformers; it uses the project's torch.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from cpu import restrict
from cpu.engines.child import Worker
from cpu.engines.engine import KV_CACHE_BYTES, Running
from cpu.engines.worker import Generate
from cpu.environments import Step, borrow_packages, once, pip, python_of
from cpu.models import Model
from cpu.workloads import Room

name = "openvino"

RUNS = ["openvino-genai==2026.4.1.0"]
#: Libraries that ask for the processor's features.
LIBRARIES = ("openvino/libs/libopenvino.so*", "openvino/libs/libopenvino_intel_cpu_plugin.so", "openvino_genai/*.so*")
#: The converter's options for each of `WEIGHTS`. Groups of 64 divide the row lengths of all benchmarked models.
FORMATS = {
    "bf16": ["--weight-format", "fp16"],
    "q8_0": ["--weight-format", "int8"],
    "q4_k_m": ["--weight-format", "int4", "--group-size", "64"],
    "w8a8": ["--weight-format", "int8"],
}
CONVERTS = ["optimum-intel[openvino]==2.2.0", "transformers==5.0.0", "huggingface_hub<1.4", "datasets<5"]


def start(model: Model, room: Room, cache: Path) -> Running:
    """See `Engine.start`."""
    home = once(cache / restrict.folder_name(name), " ".join(RUNS) + restrict.recipe(LIBRARIES), _install)
    recipe = " ".join([*CONVERTS, *FORMATS[model.weights]])
    converted = once(cache / "models" / f"{model.name}-openvino", recipe, _Convert(model, cache))
    log = cache / "logs" / f"{name}-{model.name}.log"
    return Worker(python_of(home), __name__, converted, room, log, restrict.variables(home))


def _install(folder: Path, step: Step) -> None:
    step("an environment", [sys.executable, "-m", "venv", str(folder)])
    step("OpenVINO GenAI", [*pip(folder), *RUNS])
    restrict.restrict(folder, LIBRARIES, step)


def _install_converter(folder: Path, step: Step) -> None:
    step("an environment for its converter", [sys.executable, "-m", "venv", str(folder)])
    borrow_packages(folder)
    step("OpenVINO's converter", [*pip(folder), *CONVERTS])


class _Convert:
    def __init__(self, model: Model, cache: Path) -> None:
        self.model, self.cache = model, cache

    def __call__(self, folder: Path, step: Step) -> None:
        recipe = f"{' '.join(CONVERTS)}, torch from {sysconfig.get_paths()['purelib']}"
        converter = once(self.cache / f"{name}-converter", recipe, _install_converter)
        command = [str(converter / "bin" / "optimum-cli"), "export", "openvino", "--model", str(self.model.folder)]
        command += ["--task", "text-generation-with-past", *FORMATS[self.model.weights], str(folder)]
        step(f"model {self.model.name} for OpenVINO", command)


def load(folder: Path, longest: int, cpus: int) -> tuple[str, Generate]:
    """See `worker`."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = KV_CACHE_BYTES >> 30
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": cpus, "PERFORMANCE_HINT": "LATENCY"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def config(out: int) -> openvino_genai.GenerationConfig:
        made = openvino_genai.GenerationConfig()
        made.max_new_tokens = made.min_new_tokens = out
        made.ignore_eos = True
        made.do_sample = False
        return made

    def generate(requests: list[tuple[list[int], int]]) -> list[int]:
        handles = [
            pipeline.add_request(index, openvino.Tensor(np.array([prompt], dtype=np.int64)), config(out))
            for index, (prompt, out) in enumerate(requests)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [len(handle.read_all()[0].generated_ids) for handle in handles]

    return openvino_genai.__version__, generate
