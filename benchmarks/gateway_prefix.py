"""Measure ways to choose one of several real servers: share of cached prompt tokens, and time to first token.

    python benchmarks/gateway_prefix.py [--servers 3] [--conversations 12] [--turns 4] [--rounds 3]
                                        [--sglang-router PYTHON] [--output FILE]

The servers run the demo model on this machine's cores. Conversations start with one of three system prompts and run
concurrently; each turn adds the previous answer and a question, after an exponential pause. The ways alternate, and
each has its own system prompts, so that none hits cache entries of another. Cached tokens are read from `usage`.

- gateway: ``stoker gateway``.
- random, least request: the client chooses. Least request takes the better of two random servers by requests in flight,
  as Envoy does.
- sglang-router: with ``--policy cache_aware``, run by the given Python; skipped without it. It adds SGLang's fields to
  each request, which a relay removes, because the servers refuse unknown fields.

After each round of a way, except sglang-router's, the same conversations with their real lengths are simulated in
virtual time, by the picker and the servers of `gateway_routing.py` (last column). The measured and the simulated share
should differ by less than 5 points.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from gateway_routing import KINDS, Conversation, World, simpler_ways, with_picker
from gateway_ttft import percentile, table
from machine import cpu_name

MODEL: Final = "gemma-3-270m"
SYSTEMS: Final = 3
SYSTEM_WORDS: Final = 300
QUESTION_WORDS: Final = 80
ANSWER_TOKENS: Final = 24
PAUSE_S: Final = 4.0
#: Number of simulations of each round, with different pauses; their mean is reported.
SIMULATIONS: Final = 20

#: Chooses a server: returns its URL, and a function to call when the request has ended.
Choose = Callable[[], tuple[str, Callable[[], None]]]


@dataclass
class Turn:
    """Answered request.

    Attributes:
        talk: number of its conversation.
        prompt, cached: prompt tokens, and how many of them were cached.
        first_s, took_s: seconds to the first token, and to the end.
    """

    talk: int
    prompt: int
    cached: int
    first_s: float
    took_s: float


@dataclass
class Way:
    """Results of one way to choose.

    Attributes:
        simulated: cached share by simulation, one per round.
    """

    turns: list[Turn] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Return the share of prompt tokens that were cached."""
        return sum(turn.cached for turn in self.turns) / sum(turn.prompt for turn in self.turns)


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, path: str = "/health") -> Iterator[str]:
    """Run a server program, and yield its URL once `path` answers."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 180
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(f"{' '.join(command)} did not start to serve") from None
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


class Relay:
    """Proxy in front of a server that removes SGLang's own fields from requests."""

    def __init__(self, server: str, known: frozenset[str]) -> None:
        self._server = server
        self._known = known

    async def start(self) -> str:
        """Start serving on the running event loop, and return the URL."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if body:
            body = json.dumps({name: value for name, value in json.loads(body).items() if name in self._known}).encode()
        headers = {"content-type": "application/json"}
        url, timeout = self._server + request.path, aiohttp.ClientTimeout(total=300)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(request.method, url, data=body, headers=headers) as got,
        ):
            answer = web.StreamResponse(status=got.status, headers={"content-type": got.content_type})
            await answer.prepare(request)
            async for data in got.content.iter_any():
                await answer.write(data)
            return answer


@contextmanager
def relays(servers: list[str]) -> Iterator[list[str]]:
    """Run a relay in front of each server in a thread, and yield their URLs."""
    with urllib.request.urlopen(f"{servers[0]}/openapi.json") as answer:
        known = frozenset(json.load(answer)["components"]["schemas"]["ChatCompletionRequest"]["properties"])
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    started = [asyncio.run_coroutine_threadsafe(Relay(server, known).start(), loop) for server in servers]
    yield [each.result() for each in started]
    loop.call_soon_threadsafe(loop.stop)


def text(rng: random.Random, words: int) -> str:
    """Return random text of `words` words."""
    parts = ["when", "so", "river", "the", "a", "light", "of", "over", "many", "stone", "house", "old", "we", "were"]
    return " ".join(rng.choices(parts, k=words))


async def talk(
    session: aiohttp.ClientSession, number: int, system: str, turns: int, rng: random.Random, choose: Choose, way: Way
) -> None:
    """Run one conversation."""
    messages = [{"role": "system", "content": system}]
    for _ in range(turns):
        await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
        messages.append({"role": "user", "content": text(rng, QUESTION_WORDS)})
        url, ended = choose()
        body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        began, first, text_of_answer, usage = time.perf_counter(), 0.0, "", None
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        first = first or time.perf_counter()
                        text_of_answer += choice["delta"]["content"]
        ended()
        assert usage is not None
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        took = time.perf_counter() - began
        way.turns.append(Turn(number, usage["prompt_tokens"], cached, (first or began + took) - began, took))
        messages.append({"role": "assistant", "content": text_of_answer})


async def converse(choose: Choose, conversations: int, turns: int, seed: str, way: Way) -> None:
    """Run all conversations of a round."""
    rng = random.Random(seed)
    systems = [f"{seed} {number}. {text(rng, SYSTEM_WORDS)}" for number in range(SYSTEMS)]
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        talks: list[Awaitable[None]] = [
            talk(session, number, systems[number % SYSTEMS], turns, random.Random(f"{seed}{number}"), choose, way)
            for number in range(conversations)
        ]
        await asyncio.gather(*talks)


def by_client(servers: list[str], tries: int, seed: str) -> Choose:
    """Choose the server with the fewest requests in flight among `tries` random ones."""
    rng, under_way = random.Random(seed), dict.fromkeys(servers, 0)

    def choose() -> tuple[str, Callable[[], None]]:
        server = min(rng.sample(servers, tries), key=under_way.__getitem__)
        under_way[server] += 1

        def ended() -> None:
            under_way[server] -= 1

        return server, ended

    return choose


def always(url: str) -> Choose:
    """Choose the same URL for all requests."""
    return lambda: (url, lambda: None)


def simulated(turns: list[Turn], servers: int, way: str, seed: int) -> float:
    """Return the cached share of the same conversations in virtual time."""
    world = World(KINDS["chat"], servers, seed)
    picker = with_picker(world, 1) if way == "gateway" else None
    simple = {"random": "random", "least request": "least request of two"}
    choose = picker.choose if picker is not None else simpler_ways(world)[simple[way]]
    by_talk: dict[int, list[Turn]] = {}
    for turn in turns:
        by_talk.setdefault(turn.talk, []).append(turn)
    # Tokens of the system prompt, by its share of the words of the shortest first turn.
    first = min(turns[0].prompt for turns in by_talk.values())
    system = round(first * SYSTEM_WORDS / (SYSTEM_WORDS + QUESTION_WORDS))
    for each in world.servers:
        each.system_tokens = system
    chance, order, hits = random.Random(seed), count(), 0
    events: list[tuple[float, int, str, int, int]] = []
    talks = {number: Conversation(number, number % SYSTEMS, system, 0, 0) for number in by_talk}

    def at(when: float, event: str, number: int, server: int = 0) -> None:
        heapq.heappush(events, (when, next(order), event, number, server))

    for number in talks:
        at(chance.expovariate(1 / PAUSE_S), "ask", number)
    next_turn = dict.fromkeys(talks, 0)
    polled = 0.0
    while events:
        now, _, event_kind, number, server = heapq.heappop(events)
        while picker is not None and polled <= now:
            for polled_server in range(servers):
                picker.poll(polled_server, polled)
            polled += 1.0
        conversation, turn = talks[number], by_talk[number][next_turn[number]]
        if event_kind == "ask":
            conversation.num_tokens = turn.prompt
            chosen = choose(conversation, now)
            _, hit = world.servers[chosen].begin(conversation, now)
            hits += hit
            at(now + turn.first_s, "first", number, chosen)
        elif event_kind == "first":
            world.servers[server].waiting -= 1
            world.servers[server].running += 1
            at(now + turn.took_s - turn.first_s, "end", number, server)
        else:
            world.servers[server].running -= 1
            if picker is not None:
                picker.end(conversation, server, now)
            next_turn[number] += 1
            if next_turn[number] < len(by_talk[number]):
                at(now + chance.expovariate(1 / PAUSE_S), "ask", number)
    return hits / sum(turn.prompt for turn in turns)


def run(args: argparse.Namespace) -> str:
    """Run the benchmark, and return the report as Markdown."""
    with ExitStack() as stack:
        servers = []
        for number in range(args.servers):
            port = free_port()
            command = [sys.executable, "-m", "stoker", "serve", f"demo://{MODEL}", f"--port={port}"]
            template = Path(__file__).parents[1] / "examples/chat-template.jinja"
            flags = ["--max-model-len=4096", f"--chat-template={template}"]
            servers.append(stack.enter_context(running([*command, *flags], port)))
            print(f"server {number + 1} of {args.servers} is ready", file=sys.stderr, flush=True)
        port = free_port()
        front = [sys.executable, "-m", "stoker", "gateway", f"--port={port}"]
        front += [f"--endpoint={MODEL}={server}" for server in servers]
        gateway = stack.enter_context(running(front, port, "/v1/models"))
        ways: dict[str, Callable[[str], Choose]] = {
            "gateway": lambda seed: always(gateway),
            "random": lambda seed: by_client(servers, 1, seed),
            "least request": lambda seed: by_client(servers, 2, seed),
        }
        if args.sglang_router:
            port = free_port()
            words = ["-m", "sglang_router.launch_router", "--policy=cache_aware", f"--port={port}", "--worker-urls"]
            behind = stack.enter_context(relays(servers))
            router = stack.enter_context(running([args.sglang_router, *words, *behind], port))
            ways["sglang-router"] = lambda seed: always(router)
        results = {name: Way() for name in ways}
        for server in servers:  # warm-up
            asyncio.run(converse(always(server), 2, 1, f"{args.seed} {server}", Way()))
        for number in range(args.rounds):
            for name in random.Random(f"{args.seed} {number}").sample(list(ways), len(ways)):
                make = ways[name]
                seed, way = f"{args.seed} {number} {name}", Way()
                asyncio.run(converse(make(seed), args.conversations, args.turns, seed, way))
                if name != "sglang-router":
                    dealt = [simulated(way.turns, args.servers, name, each) for each in range(SIMULATIONS)]
                    results[name].simulated.append(statistics.mean(dealt))
                results[name].turns += way.turns
                print(f"round {number + 1}: {name} {way.share:.1%}", file=sys.stderr, flush=True)
    rows = [["way", "requests", "cached share", "time to first token, p50, p99, s", "cached share, simulated"]]
    for name, way in results.items():
        first = [turn.first_s for turn in way.turns]
        hit_share = f"{statistics.mean(way.simulated):.1%}" if way.simulated else ""
        times = f"{statistics.median(first):.2f}, {percentile(first, 0.99):.2f}"
        rows.append([name, str(len(first)), f"{way.share:.1%}", times, hit_share])
    return "\n\n".join(
        [
            f"{cpu_name()}, {os.cpu_count()} shared cores; {args.servers} servers of {MODEL}, {args.conversations} "
            f"conversations of {args.turns} turns, {SYSTEMS} system prompts; {args.rounds} alternating rounds.",
            table(rows) + "\n",
        ]
    )


def main() -> None:
    """Parse the flags and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sglang-router", metavar="PYTHON", help="Python interpreter of an environment with sglang-router"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report = run(args)
    print(report)
    if args.output is not None:
        args.output.write_text(report)


if __name__ == "__main__":
    main()
