"""Measure a server with concurrent streams: CPU time outside the engine, memory, and token gaps during long prompts.

    python benchmarks/serving.py MODEL [--clients 32] [--prompt 7936] [--output FILE]

streams    `--clients` concurrent streams, 128 tokens in, 128 out, three times: CPU time and memory of the server's
           process and of its engine
gaps       one stream decodes while prompts of `--prompt` tokens run one after another: time between two of its tokens
           ("beside"), compared with a stream alone, and duration of the prompts. One server per value of `BOUNDS` runs;
           they are measured in turns, because the speed of a machine changes within minutes

The client shares the processor with the server, and only looks at the first bytes of each event. The model's tokens
must have text: a token without text is not sent as an event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from gateway_ttft import percentile, table
from machine import Machine

KV_CACHE_BYTES: Final = 1 << 30
START_S: Final = 120
BOUNDS: Final = ("", "--long-prefill-token-threshold=256", "--long-prefill-token-threshold=0")
#: Number of measurements of the gaps with each bound.
TURNS: Final = 3
#: Number of prompts that run one after another beside a stream.
PROMPTS: Final = 8
TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """CPU time in seconds, and anonymous memory in bytes, of processes."""

    cpu_s: float
    anonymous: int

    @classmethod
    def of(cls, pids: list[int]) -> Cost:
        """Return the cost of these processes up to now."""
        ticks = anonymous = 0
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            anonymous += int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0]) << 10
        return cls(ticks / TICKS, anonymous)


@dataclass(frozen=True)
class Server:
    """Server that is ready."""

    pid: int
    port: int
    ready_s: float

    def engine(self) -> list[int]:
        """Return the process ids of all descendants of the server."""
        found: list[int] = []
        unvisited = [self.pid]
        while unvisited:
            for task in Path(f"/proc/{unvisited.pop()}/task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                unvisited += children
        return found

    async def stream(self, prompt: list[int], out: int) -> AsyncIterator[float]:
        """Yield the arrival time of each of `out` tokens."""
        body = {"model": "m", "prompt": prompt, "max_tokens": out, "temperature": 0, "ignore_eos": True, "stream": True}
        text = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + text)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"the server answered {status.decode()} {(await reader.read(2000)).decode()}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                yield time.perf_counter()
        writer.close()


@contextmanager
def serve(model: str, *flags: str) -> Iterator[Server]:
    """Run a server of the model, and stop it at the end."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    words = ["serve", model, f"--port={port}", "--served-model-name=m", "--no-enable-prefix-caching"]
    words += [f"--kv-cache-memory-bytes={KV_CACHE_BYTES}", "--uvicorn-log-level=warning", *flags]
    started = time.perf_counter()
    log = Path(tempfile.gettempdir()) / f"stoker-serving-{port}.log"
    command = [sys.executable, "-m", "stoker", *words]
    with log.open("w") as output, subprocess.Popen(command, stderr=output, start_new_session=True) as process:
        try:
            if not is_ready(port, process):
                raise SystemExit(f"the server did not start: {log}")
            yield Server(process.pid, port, time.perf_counter() - started)
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def is_ready(port: int, process: subprocess.Popen[bytes], seconds: float = START_S) -> bool:
    """Wait until the server is ready; return False if it ends or exceeds `seconds`."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                if b" 200 " in connection.recv(64):
                    return True
        except ConnectionError:
            pass
        time.sleep(0.05)
    return False


def prompt(rng: random.Random, length: int) -> list[int]:
    """Return a random prompt, which no prefix cache contains."""
    return [rng.randrange(1000, 40_000) for _ in range(length)]


async def token_times(server: Server, tokens: list[int], out: int) -> list[float]:
    """Return the arrival times of a stream's tokens."""
    return [at async for at in server.stream(tokens, out)]


async def streams(server: Server, clients: int, rng: random.Random) -> list[list[str]]:
    """Return the rows of the streams' table."""
    engine = server.engine()
    rows = []
    await asyncio.gather(*(token_times(server, prompt(rng, 128), 8) for _ in range(clients)))
    for number in range(3):
        before = Cost.of([server.pid]), Cost.of(engine)
        began = time.perf_counter()
        await asyncio.gather(*(token_times(server, prompt(rng, 128), 128) for _ in range(clients)))
        took = time.perf_counter() - began
        after = Cost.of([server.pid]), Cost.of(engine)
        server_s, engine_s = (then.cpu_s - now.cpu_s for now, then in zip(before, after, strict=True))
        memory = [f"{cost.anonymous / 2**20:.0f}" for cost in after]
        rows.append([str(number + 1), f"{clients * 128 / took:.0f}", f"{server_s:.2f}", f"{engine_s:.2f}"])
        rows[-1] += [f"{server_s / engine_s:.1%}", *memory]
    return rows


async def gaps(server: Server, long: int, rng: random.Random) -> tuple[list[float], list[float], list[float]]:
    """Measure the gaps of a stream, alone and beside prompts of `long` tokens.

    Returns:
        Seconds between two tokens of a stream alone, the same while prompts are computed, and each prompt's TTFT in
        seconds.
    """
    alone = await token_times(server, prompt(rng, 16), 400)
    times: list[float] = []

    async def decode() -> None:
        async for at in server.stream(prompt(rng, 16), 2000):
            times.append(at)

    decoding = asyncio.create_task(decode())
    await asyncio.sleep(0.3)
    reading: list[tuple[float, float]] = []
    for _ in range(PROMPTS):
        began = time.perf_counter()
        await token_times(server, prompt(rng, long), 1)
        reading.append((began, time.perf_counter()))
    assert not decoding.done(), "the stream ended before the prompts did"
    decoding.cancel()
    whole = [ended - began for began, ended in reading]
    beside = [
        later - earlier
        for earlier, later in pairwise(times)
        if any(began <= earlier and later <= ended for began, ended in reading)
    ]
    return [later - earlier for earlier, later in pairwise(alone)], beside, whole


async def gaps_in_turns(model: str, long: int, rng: random.Random) -> list[list[str]]:
    """Return one row per bound; each value is the median of `TURNS`."""
    turns: list[list[list[float]]] = [[] for _ in BOUNDS]
    with ExitStack() as stack:
        servers = [stack.enter_context(serve(model, *bound.split())) for bound in BOUNDS]
        for _ in range(TURNS):
            for server, figures in zip(servers, turns, strict=True):
                alone, beside, whole = await gaps(server, long, rng)
                step, late = percentile(alone, 0.5), percentile(beside, 0.99)
                figures.append([step, percentile(alone, 0.99), percentile(beside, 0.5), late, late / step])
                figures[-1] += [len(beside), percentile(whole, 0.5)]
    rows = []
    for figures in turns:
        *times, ratio, count, whole_s = (median(each) for each in zip(*figures, strict=True))
        rows.append([*(f"{each * 1e3:.1f}" for each in times), f"{ratio:.1f}", f"{count:.0f}", f"{whole_s:.2f}"])
    return rows


def main() -> None:
    """Run the benchmark, print the report, and write it to `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=7936)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    parts = [f"{options.model}, {Machine.measure()}"]
    with serve(options.model) as server:
        rows = asyncio.run(streams(server, options.clients, rng))
        ready = server.ready_s
    head = ["round", "tokens/s", "server, CPU s", "engine, CPU s", "server ÷ engine", "server, MiB", "engine, MiB"]
    title = (
        f"{options.clients} streams, 128 in, 128 out; ready after {ready:.1f} s; KV cache {KV_CACHE_BYTES >> 20} MiB"
    )
    parts.append(f"{title}; MiB are of anonymous memory\n\n{table([head, *rows])}")
    rows = [
        [bound or "none", *row]
        for bound, row in zip(BOUNDS, asyncio.run(gaps_in_turns(options.model, options.prompt, rng)), strict=True)
    ]
    head = ["flag", "alone, p50", "p99", "beside, p50", "p99", "÷ alone, p50", "gaps beside", "prompt, s"]
    title = f"One stream beside prompts of {options.prompt:,} tokens, ms; medians of {TURNS} turns"
    parts.append(f"{title}\n\n{table([head, *rows])}")
    text = "\n\n".join(parts) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
