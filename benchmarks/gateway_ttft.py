"""Measure what the gateway adds to the time to first token (TTFT), and what many concurrent streams cost it.

    python benchmarks/gateway_ttft.py [--rate 200] [--seconds 20] [--tokens 512 8192] [--streams 2000] [--output FILE]

The servers are stubs that stream at once (`stub_servers.py`), so the gateway's latency is measured, and not the quality
of its routing. Requests come in pairs with equal bodies: one is sent directly to a server, one through the gateway, in
random order. Each kind has `--rate` requests/s with exponential gaps, independent of responses (open loop). TTFT lasts
from writing the request to reading the first event. "added" is the difference within a pair; "straight" (direct
requests) shows the delays of the client and the stubs, which both requests of a pair contain.

Then `--streams` streams run concurrently with one event/s each. CPU time and memory are those of Envoy and the picker.
On a machine with few cores the client, the stubs, Envoy and the picker compete, which raises the tail latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from machine import cpu_name

#: Bytes per token of English text.
TOKEN_BYTES: Final = 4
EVENTS: Final = 8
INTERVAL_S: Final = 0.02
STUBS: Final = 4
#: Number of requests before the measurement, which open connections and warm up code.
WARM_UP: Final = 200
TICKS: Final = os.sysconf("SC_CLK_TCK")


class Connection(asyncio.Protocol):
    """Client connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._status = b""
        self._first: asyncio.Future[float] | None = None
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        for future in (self._first, self._ended):
            if future is not None and not future.done():
                future.set_exception(ConnectionError("the connection ended"))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        now = time.perf_counter()
        assert self._first is not None and self._ended is not None
        self._tail = (self._tail + data)[-4096:]
        if not self._first.done():
            if not self._tail.startswith(b"HTTP/1.1 200"):
                self._first.set_exception(ConnectionError(self._tail[:300].decode(errors="replace")))
                return
            if b"data: " in self._tail:
                self._first.set_result(now)
        if self._tail.endswith(b"\r\n0\r\n\r\n") and not self._ended.done():
            self._ended.set_result(None)

    async def ask(self, request: bytes) -> float:
        """Send a request, read its response to the end, and return the seconds to the first event."""
        loop = asyncio.get_running_loop()
        assert self._transport is not None
        self._tail, self._first, self._ended = b"", loop.create_future(), loop.create_future()
        began = time.perf_counter()
        self._transport.write(request)
        first = await self._first
        await self._ended
        return first - began

    def close(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._first = self._ended = None
        self._transport.close()


class Client:
    """Pool of connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Connection] = []

    async def ask(self, request: bytes) -> float:
        """Send a request and return the seconds to its first event."""
        if self._free:
            connection = self._free.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        took = await connection.ask(request)
        self._free.append(connection)
        return took

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._free:
            connection.close()


@dataclass(frozen=True)
class Cost:
    """CPU time and resident memory of a process.

    Attributes:
        cpu_s: CPU time in seconds, user and system.
        memory_mib: resident memory in MiB.
    """

    cpu_s: float
    memory_mib: float

    @classmethod
    def of(cls, pid: int) -> Cost:
        """Return the cost of a process up to now."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
        return cls((int(fields[11]) + int(fields[12])) / TICKS, int(status[0]) / 1024)


@dataclass(frozen=True)
class Gateway:
    """Running gateway: its port, and the process ids of the picker and Envoy."""

    port: int
    picker: int
    envoy: int

    def costs(self) -> tuple[Cost, Cost]:
        """Return the costs of Envoy and of the picker."""
        return Cost.of(self.envoy), Cost.of(self.picker)


@contextmanager
def stubs(events: int, interval_s: float) -> Iterator[list[int]]:
    """Run stub servers, and yield their ports."""
    command = [sys.executable, str(Path(__file__).with_name("stub_servers.py"))]
    words = [str(STUBS), str(events), str(interval_s)]
    with subprocess.Popen([*command, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        yield [int(port) for port in process.stdout.readline().split()]
        process.stdin.close()


@contextmanager
def gateway(servers: list[int]) -> Iterator[Gateway]:
    """Run a gateway in front of these servers."""
    endpoints = [f"--endpoint=m=http://127.0.0.1:{port}" for port in servers]
    command = [sys.executable, "-m", "stoker", "gateway", "--port=0", *endpoints]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().rpartition(":")[2])
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            by_name = {Path(f"/proc/{each}/comm").read_text().strip(): int(each) for each in children}
            envoy = by_name.pop("envoy")
            (picker,) = by_name.values()
            yield Gateway(port, picker, envoy)
        finally:
            process.terminate()


def request(rng: random.Random, tokens: int) -> bytes:
    """Return a request with a prompt of about `tokens` tokens; its first 40 % are equal in all requests."""
    words = [f"{first}{second}" for first in ("when", "so", "river", "the", "a") for second in ("", "s", "ing", "ly")]
    size = tokens * TOKEN_BYTES
    beginning = " ".join(random.Random(0).choices(words, k=size // 4))[: size * 2 // 5]
    question = " ".join(rng.choices(words, k=size // 3))[: size - len(beginning)]
    messages = [{"role": "system", "content": beginning}, {"role": "user", "content": question}]
    body = json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 100}).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "host: m", "content-type: application/json"]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


def percentile(values: list[float], part: float) -> float:
    """Return a percentile by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def table(rows: list[list[str]]) -> str:
    """Format a Markdown table; the first row is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


async def pairs(front: Gateway, servers: list[int], rate: float, seconds: float, tokens: int, seed: int) -> list[str]:
    """Measure pairs of requests; return one row of the first table."""
    rng = random.Random(seed)
    bodies = [request(rng, tokens) for _ in range(64)]
    through, straight = Client(front.port), [Client(port) for port in servers]
    taken: list[tuple[float, float]] = []

    async def pair(body: bytes, first: bool, pause: float) -> None:
        async def time_to_first_token(client: Client, wait: float) -> float:
            await asyncio.sleep(wait)
            return await client.ask(body)

        server = rng.choice(straight)
        taken.append(
            await asyncio.gather(
                time_to_first_token(server, pause * (not first)), time_to_first_token(through, pause * first)
            )
        )

    for started in range(0, WARM_UP, 8):
        await asyncio.gather(*(pair(bodies[(started + each) % 64], True, 0) for each in range(8)))
    taken.clear()
    gc.collect()
    gc.freeze()
    before, began, running = front.costs(), time.perf_counter(), set()
    due = began
    while due < began + seconds:
        running.add(asyncio.create_task(pair(rng.choice(bodies), rng.random() < 0.5, rng.expovariate(rate))))
        due += rng.expovariate(rate)
        await asyncio.sleep(due - time.perf_counter())
    await asyncio.gather(*running)
    took, after = time.perf_counter() - began, front.costs()
    for client in (through, *straight):
        client.close()
    ms = [[value * 1e3 for value in kind] for kind in zip(*taken, strict=True)]
    added = [via - alone for alone, via in zip(*ms, strict=True)]
    envoy, picker = ((end.cpu_s - start.cpu_s) for start, end in zip(before, after, strict=True))
    return [
        str(tokens),
        str(len(taken)),
        *(f"{statistics.median(kind):.2f}, {percentile(kind, 0.99):.2f}" for kind in ms),
        f"**{statistics.median(added):.2f}, {percentile(added, 0.99):.2f}**",
        *(f"{cpu / len(taken) * 1e3:.2f} ({cpu / took:.0%})" for cpu in (envoy, picker)),
        f"{after[0].memory_mib:.0f}, {after[1].memory_mib:.0f}",
    ]


async def together(front: Gateway, streams: int, seconds: float, seed: int) -> list[str]:
    """Measure concurrent streams, started over a third of `seconds`; return one row of the second table."""
    rng = random.Random(seed)
    bodies = [request(rng, 512) for _ in range(64)]
    client, before = Client(front.port), front.costs()
    began = time.perf_counter()

    async def run_stream(number: int) -> float:
        await asyncio.sleep(seconds / 3 * number / streams)
        return await client.ask(rng.choice(bodies))

    running = [asyncio.create_task(run_stream(number)) for number in range(streams)]
    await asyncio.sleep(seconds * 0.8)
    peak = front.costs()
    first = [each * 1e3 for each in await asyncio.gather(*running)]
    took, after = time.perf_counter() - began, front.costs()
    client.close()
    return [
        str(streams),
        f"{statistics.median(first):.2f}, {percentile(first, 0.99):.2f}",
        *(f"{(end.cpu_s - start.cpu_s) / took:.0%}" for start, end in zip(before, after, strict=True)),
        f"{before[0].memory_mib:.0f} → {peak[0].memory_mib:.0f}",
        f"{before[1].memory_mib:.0f} → {peak[1].memory_mib:.0f}",
    ]


def run(args: argparse.Namespace) -> str:
    """Run the benchmark, and return the report as Markdown."""
    head = ["prompt tokens", "pairs", "straight", "through", "**added**", "Envoy, CPU ms per request (share of a core)"]
    rows = [[*head, "picker, the same", "memory of Envoy and picker, MiB"]]
    with stubs(EVENTS, INTERVAL_S) as servers, gateway(servers) as front:
        for tokens in args.tokens:
            rows.append(asyncio.run(pairs(front, servers, args.rate, args.seconds, tokens, args.seed)))
            print(table([rows[0], rows[-1]]), flush=True)
    sections = [
        f"{cpu_name()}, {os.cpu_count()} cores, which client, stubs, Envoy and picker share.",
        f"Time to first token, p50 and p99 in ms, at {args.rate:g} requests/s straight and as many through the "
        f"gateway, {EVENTS} events each:",
        table(rows),
    ]
    if args.streams:
        seconds = 30.0
        with stubs(int(seconds), 1.0) as servers, gateway(servers) as front:
            row = asyncio.run(together(front, args.streams, seconds, args.seed))
        names = ["streams at once", "time to first token, p50, p99, ms", "Envoy's share of a core", "the picker's"]
        sections += [
            "Streams of an event a second, all through one gateway:",
            table([[*names, "Envoy's memory, MiB", "the picker's, MiB"], row]),
        ]
    return "\n\n".join(sections) + "\n"


def main() -> None:
    """Parse the flags and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    report = run(args)
    print(report)
    if args.output is not None:
        args.output.write_text(report)


if __name__ == "__main__":
    main()
