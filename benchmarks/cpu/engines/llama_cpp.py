"""llama.cpp's server, by HTTP, with one slot per concurrent request."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

import httpx
from workloads import Workload

from cpu.engines.child import RUN_S, START_S, Child
from cpu.engines.engine import Finished, Running
from cpu.environments import CannotRunError
from cpu.gguf import VERSION, build, gguf_file
from cpu.models import Model
from cpu.workloads import Room

name = "llama.cpp"


def start(model: Model, room: Room, cache: Path) -> Running:
    """See `Engine.start`."""
    if model.weights == "w8a8":
        raise CannotRunError("llama.cpp loads only GGUF files")
    file = model.file or gguf_file(model.name, "bf16", model.folder, cache)
    return Server(build(cache), file, room, cache / "logs" / f"{name}-{model.name}.log")


class Server(Child):
    """The server process, with a client."""

    version = VERSION

    def __init__(self, home: Path, file: Path, room: Room, log: Path) -> None:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            port = any_port.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        cpus = str(os.cpu_count() or 1)
        command = [str(home / "build" / "bin" / "llama-server"), "--model", str(file), "--port", str(port)]
        command += ["--threads", cpus, "--threads-batch", cpus, "--parallel", str(room.at_once)]
        command += ["--ctx-size", str(room.at_once * room.longest), "--no-warmup", "--no-ui", "--offline"]
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
                raise CannotRunError(
                    f"{workload.name}: it counted {usage['prompt_tokens']} prompt tokens instead of {len(prompt)}"
                )
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
