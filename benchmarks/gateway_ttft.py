"""What the gateway adds to the time to first token, and what many streams at once cost it.

    python benchmarks/gateway_ttft.py [--rate 200] [--seconds 20] [--tokens 512 8192] [--streams 2000] [--output FILE]

Servers are stubs that stream at once (`stub_servers.py`), so what is measured is the gateway alone, and not how well it
picks. Requests come in pairs of the same body, one straight to a server and one through the gateway, in random order,
each kind at `--rate` a second with exponential pauses whether or not earlier ones have ended (open loop). An answer's
time counts from when the request is written to when the first event is read. The differences are those of pairs; the
client's and the stubs' own delays are in both, and shown as "straight".

Then `--streams` streams run at once, one event a second each. Processor time and memory are Envoy's and the picker's.
On a machine with few cores all four share them, which makes the slowest requests slower.
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

#: Bytes of English text a token has.
TOKEN_BYTES: Final = 4
EVENTS: Final = 8
INTERVAL_S: Final = 0.02
STUBS: Final = 4
#: How many requests must have ended before measuring begins: connections are open then, and code is warm.
WARM_UP: Final = 200
TICKS: Final = os.sysconf("SC_CLK_TCK")


class Connection(asyncio.Protocol):
    """One connection, which has one request at a time."""

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
        """Sends a request and reads its answer to the end: seconds to the first event."""
        loop = asyncio.get_running_loop()
        assert self._transport is not None
        self._tail, self._first, self._ended = b"", loop.create_future(), loop.create_future()
        began = time.perf_counter()
        self._transport.write(request)
        first = await self._first
        await self._ended
        return first - began

    def close(self) -> None:
        """Ends the connection."""
        assert self._transport is not None
        self._first = self._ended = None
        self._transport.close()


class Client:
    """Keeps connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Connection] = []

    async def ask(self, request: bytes) -> float:
        """Seconds to the first event."""
        if self._free:
            connection = self._free.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        took = await connection.ask(request)
        self._free.append(connection)
        return took

    def close(self) -> None:
        """Ends connections."""
        for connection in self._free:
            connection.close()


@dataclass(frozen=True)
class Cost:
    """Processor seconds, and MiB in memory, of a process."""

    cpu_s: float
    memory_mib: float

    @classmethod
    def of(cls, pid: int) -> Cost:
        """Up to now."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
        return cls((int(fields[11]) + int(fields[12])) / TICKS, int(status[0]) / 1024)


@dataclass(frozen=True)
class Gateway:
    """One that runs."""

    port: int
    picker: int
    envoy: int

    def costs(self) -> tuple[Cost, Cost]:
        """Envoy's and the picker's."""
        return Cost.of(self.envoy), Cost.of(self.picker)


@contextmanager
def stubs(events: int, interval_s: float) -> Iterator[list[int]]:
    """The servers' ports."""
    command = [sys.executable, str(Path(__file__).with_name("stub_servers.py"))]
    words = [str(STUBS), str(events), str(interval_s)]
    with subprocess.Popen([*command, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        yield [int(port) for port in process.stdout.readline().split()]
        process.stdin.close()


@contextmanager
def gateway(servers: list[int]) -> Iterator[Gateway]:
    """A gateway before these servers."""
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
    """One whose prompt has about so many tokens; the first two fifths are the same in all."""
    words = [f"{first}{second}" for first in ("when", "so", "river", "the", "a") for second in ("", "s", "ing", "ly")]
    size = tokens * TOKEN_BYTES
    beginning = " ".join(random.Random(0).choices(words, k=size // 4))[: size * 2 // 5]
    question = " ".join(rng.choices(words, k=size // 3))[: size - len(beginning)]
    messages = [{"role": "system", "content": beginning}, {"role": "user", "content": question}]
    body = json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 100}).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "host: m", "content-type: application/json"]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


def percentile(values: list[float], part: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


async def pairs(front: Gateway, servers: list[int], rate: float, seconds: float, tokens: int, seed: int) -> list[str]:
    """A row of the table of pairs."""
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
    """A row of the table of streams: they begin within some seconds, and run at once then."""
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
    """Measures; what came of it, in Markdown."""
    head = ["prompt tokens", "pairs", "straight", "through", "**added**", "Envoy, ms of a core a request (share)"]
    rows = [[*head, "picker, the same", "memory of both, MiB"]]
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
    """Parses flags."""
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
