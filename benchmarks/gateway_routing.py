"""Compare the gateway's picker with simpler ways to choose among many servers, in virtual time.

    python benchmarks/gateway_routing.py [--servers 1000] [--requests 60000] [--seed 0]

The real `EndpointPicker` routes seeded conversations among simulated servers. It learns a server's load only by
polling, at the longer period that it uses for so many servers, and when one of its own requests ends (not with
``--ends-unknown``). The simpler ways know each server's current load.

Means of the conversations are published values. The distributions are this benchmark's own: geometric turns, lognormal
lengths and pauses, a Zipf law for system prompts.

- ``chat``: 2.0 turns, 69.5 prompt and 214.5 answer tokens a turn (Zheng et al., "LMSYS-Chat-1M: A Large-Scale
  Real-World LLM Conversation Dataset", ICLR 2024, arXiv 2309.11998), after one of 50 system prompts of 400 tokens.
- ``agents``: prompts of about 8,600 tokens, of which about 59% were seen before, and answers of 182 (Qin et al.,
  "Mooncake: Trading More Storage for Less Computation — A KVCache-centric Architecture for Serving LLM Chatbot",
  FAST 2025, tool and agent trace; figures from memory): 4 turns that add
  1,900 tokens each, after one of 20 prompts of 4,000.

A server is a queue of prompts, computed one after another at `PREFILL` tokens/s, slower with more decoding sequences,
and a prefix cache of `CACHE` tokens that evicts whole conversations. It is a model: use the results only to compare
ways to choose.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import time
import tracemalloc
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Final

from stoker_common.text_prefix_hash import block_ends
from stoker_gateway.polling.poller import CORE_SHARE
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker, Pick
from stoker_gateway.scheduling.rendezvous import Rendezvous
from stoker_gateway.scheduling.routing_request import RoutingRequest

PREFILL: Final = 10_000.0
CACHE: Final = 400_000
TOKEN_BYTES: Final = 4  # per token of English text
STEP_S: Final = 0.015  # time of a decode step without sequences
SEQUENCE_STEP_S: Final = 0.0001
SLOWER: Final = 128  # number of running sequences that halves the prefill speed
ASK_S: Final = 0.001  # CPU time of one poll


@dataclass(frozen=True)
class Kind:
    """Kind of conversations.

    Attributes:
        turns: mean number of turns.
        question, answer: mean lengths in tokens.
        systems, system: number of system prompts, and their length in tokens.
        pause_s: mean pause between turns, in seconds.
        load: requests per second and server.
    """

    turns: float
    question: float
    answer: float
    systems: int
    system: int
    pause_s: float
    load: float


KINDS: Final = {
    "chat": Kind(turns=2.0, question=69.5, answer=214.5, systems=50, system=400, pause_s=20, load=4.0),
    "agents": Kind(turns=4.0, question=1900, answer=182, systems=20, system=4000, pause_s=4, load=1.2),
}


@dataclass
class Conversation:
    """Conversation in progress.

    Attributes:
        num_tokens: current length, in tokens.
        turns: number of turns left.
    """

    number: int
    system: int
    system_tokens: int
    num_tokens: int
    turns: int
    chain: list[bytes] = field(default_factory=list)

    def ask(self) -> RoutingRequest:
        """Return its next request. Blocks within a system prompt have equal hashes in all of its conversations."""
        size = self.num_tokens * TOKEN_BYTES
        for number, end in enumerate(block_ends(size)):
            if number >= len(self.chain):
                shared = end <= self.system_tokens * TOKEN_BYTES
                name = f"{'s' if shared else 'c'} {self.system if shared else self.number} {number}"
                self.chain.append(blake2b(name.encode(), digest_size=16).digest())
        return RoutingRequest(chain=self.chain, size=size)


class Server:
    """Simulated server. The first `system_tokens` tokens of each conversation are a shared system prompt."""

    def __init__(self, system_tokens: int) -> None:
        self.system_tokens = system_tokens
        self.held: OrderedDict[tuple[str, int], int] = OrderedDict()
        self.tokens = 0
        self.free_at = 0.0
        self.waiting = 0
        self.running = 0
        self.computed = 0

    def begin(self, talk: Conversation, now: float) -> tuple[float, int]:
        """Accept a request. Return the time of its first token, and the number of its cached prompt tokens."""
        hit = self.held.get(("s", talk.system), 0)
        if hit:
            hit = max(hit, self.held.get(("c", talk.number), 0))
        to_compute = max(1, talk.num_tokens - hit)
        self.computed += to_compute
        took = to_compute / PREFILL * (1 + self.running / SLOWER)
        self.free_at = max(now, self.free_at) + took
        self.waiting += 1
        self.hold(("s", talk.system), talk.system_tokens, 0)
        self.hold(("c", talk.number), talk.num_tokens, talk.system_tokens)
        return self.free_at + STEP_S, hit

    def hold(self, name: tuple[str, int], upto: int, after: int) -> None:
        """Cache a prefix of `upto` tokens, of which the first `after` belong to another entry."""
        self.tokens += upto - self.held.get(name, after)
        self.held[name] = upto
        self.held.move_to_end(name)
        while self.tokens > CACHE and len(self.held) > 1:
            (kind, _), tokens = self.held.popitem(last=False)
            self.tokens -= tokens if kind == "s" else tokens - self.system_tokens


Choose = Callable[[Conversation, float], int]


@dataclass(frozen=True)
class Outcome:
    """Results of a trace.

    Attributes:
        hit_rate: fraction of prompt tokens that were cached.
        ttft: seconds to the first token, sorted.
        imbalance: requests at the busiest server, as a multiple of the mean; median over the run.
        pick_us: median microseconds of a choice; for the picker this includes hashing the prompt.
        whys: number of the picker's choices by reason.
    """

    hit_rate: float
    ttft: list[float]
    imbalance: float
    pick_us: float
    whys: Counter[str]


class World:
    """Servers, and conversations whose turns follow each other."""

    def __init__(self, kind: Kind, num_servers: int, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.servers = [Server(kind.system) for _ in range(num_servers)]
        self.names = [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:8000" for n in range(num_servers)]
        self.whys: Counter[str] = Counter()

    def in_flight(self, number: int) -> int:
        """Return the number of requests at a server."""
        return self.servers[number].waiting + self.servers[number].running

    def run(
        self,
        choose: Choose,
        requests: int,
        on_poll: Callable[[int, float], None] | None = None,
        on_end: Callable[[Conversation, int, float], None] | None = None,
    ) -> Outcome:
        """Route conversations until `requests` requests were made."""
        chance, kind = random.Random(self.seed), self.kind
        numbers, order = count(), count()
        events: list[tuple[float, int, str, object]] = []

        def at(when: float, event_kind: str, actor: object) -> None:
            heapq.heappush(events, (when, next(order), event_kind, actor))

        def length(mean: float, sigma: float = 1.0) -> int:
            return max(1, round(chance.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

        weights = [1 / (1 + rank) for rank in range(kind.systems)]
        rate = kind.load * len(self.servers) / kind.turns
        at(0.0, "new", None)
        if on_poll is not None:
            period = max(1.0, len(self.servers) * ASK_S / CORE_SHARE)
            for number in range(len(self.servers)):
                at(period * number / len(self.servers), "poll", number)
        made, hits, prompts, took, ttft, peaks = 0, 0, 0, list[float](), list[float](), list[float]()
        warm = requests // 5  # not counted: caches are cold
        while made < requests:
            now, _, event_kind, actor = heapq.heappop(events)
            if event_kind == "new":
                system = chance.choices(range(kind.systems), weights)[0]
                turns = 1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / kind.turns))
                talk = Conversation(next(numbers), system, kind.system, kind.system + length(kind.question), turns)
                at(now, "ask", talk)
                at(now + chance.expovariate(rate), "new", None)
            elif event_kind == "ask":
                assert isinstance(actor, Conversation)
                began = time.perf_counter()
                number = choose(actor, now)
                took.append(time.perf_counter() - began)
                first, hit = self.servers[number].begin(actor, now)
                made += 1
                if made > warm:
                    hits, prompts = hits + hit, prompts + actor.num_tokens
                    ttft.append(first - now)
                    if made % 500 == 0:
                        loads = [self.in_flight(each) for each in range(len(self.servers))]
                        peaks.append(max(loads) / statistics.mean(loads))
                at(first, "first", (actor, number))
            elif event_kind == "first":
                talk, number = actor  # type: ignore[misc]
                server = self.servers[number]
                server.waiting -= 1
                server.running += 1
                tokens = length(kind.answer)
                talk.num_tokens += tokens
                at(now + tokens * (STEP_S + SEQUENCE_STEP_S * server.running), "end", (talk, number))
            elif event_kind == "end":
                talk, number = actor  # type: ignore[misc]
                self.servers[number].running -= 1
                if on_end is not None:
                    on_end(talk, number, now)
                talk.turns -= 1
                if talk.turns > 0:
                    talk.num_tokens += length(kind.question)
                    at(now + chance.lognormvariate(math.log(kind.pause_s), 0.8), "ask", talk)
            elif on_poll is not None:
                assert isinstance(actor, int)
                on_poll(actor, now)
                at(now + period, "poll", actor)
        return Outcome(hits / prompts, sorted(ttft), statistics.median(peaks), 1e6 * statistics.median(took), self.whys)


@dataclass(frozen=True)
class Replicas:
    """Replicas of the gateway's picker that share no state."""

    choose: Choose
    poll: Callable[[int, float], None]
    end: Callable[[Conversation, int, float], None]
    pickers: list[EndpointPicker]


def with_picker(world: World, replicas: int) -> Replicas:
    """Create `replicas` pickers for the servers of a world."""
    pickers = [EndpointPicker() for _ in range(replicas)]
    for picker in pickers:
        picker.set_servers(world.names, 0.0)
    number_by_name = {name: number for number, name in enumerate(world.names)}
    chance = random.Random(world.seed + 1)
    under_way: dict[int, tuple[EndpointPicker, int]] = {}

    def choose(talk: Conversation, now: float) -> int:
        picker = chance.choice(pickers)
        pick = picker.pick(talk.ask(), now)
        assert isinstance(pick, Pick), "all servers are saturated: use fewer requests or more servers"
        world.whys[pick.why] += 1
        under_way[talk.number] = picker, pick.number
        return number_by_name[pick.servers[0]]

    def poll(number: int, now: float) -> None:
        server = world.servers[number]
        for picker in pickers:
            picker.observe(world.names[number], ServerLoad(server.running, server.waiting, 0.5), now, now)

    def end(talk: Conversation, server: int, now: float) -> None:
        picker, number = under_way.pop(talk.number)
        picker.ended(number, [world.names[server]], now)

    return Replicas(choose, poll, end, pickers)


def simpler_ways(world: World) -> dict[str, Choose]:
    """Return simpler ways to choose; they know the exact load of each server."""
    chance, calls = random.Random(world.seed + 2), count()
    number_of = range(len(world.servers))
    order = Rendezvous(world.names)
    number_by_name = {name: number for number, name in enumerate(world.names)}

    def two_choices(talk: Conversation, now: float) -> int:
        return min(chance.choice(number_of), chance.choice(number_of), key=world.in_flight)

    def bounded_hash(talk: Conversation, now: float) -> int:
        total = sum(world.in_flight(number) for number in number_of)
        max_in_flight = math.ceil(1.25 * (total + 1) / len(number_of))
        found = (number_by_name[name] for name in order.order(str(talk.number).encode()))
        return next(number for number in found if world.in_flight(number) < max_in_flight)

    return {
        "random": lambda talk, now: chance.choice(number_of),
        "round robin": lambda talk, now: next(calls) % len(number_of),
        "least request of two": two_choices,
        "bounded-load hashing": bounded_hash,
    }


def index_memory(blocks: int = 100_000, servers: int = 1000) -> float:
    """Return the bytes per block of a picker's index, with conversations of 20 blocks, 4 of them shared."""
    picker = EndpointPicker()
    picker.set_servers([f"10.0.{n >> 8}.{n & 255}:8000" for n in range(servers)], 0.0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(blocks // 16):
        talk = Conversation(number, number % 20, 512, 2560, 1)
        picker.pick(talk.ask(), float(number))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / picker.num_blocks


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ends-unknown", action="store_true", help="pickers do not learn when requests end")
    args = parser.parse_args()
    print(f"index: {index_memory():.0f} bytes per block\n")
    for name in args.kinds:
        print(f"{name}: {args.servers} servers, {args.requests} requests, seed {args.seed}")
        print(f"{'':24}{'hit rate':>10}{'TTFT p50':>10}{'p99':>10}{'busiest':>10}{'µs a pick':>11}")

        def show(way: str, outcome: Outcome) -> None:
            p50, p99 = (1e3 * outcome.ttft[int(part * len(outcome.ttft))] for part in (0.5, 0.99))
            print(
                f"{way:24}{100 * outcome.hit_rate:9.1f}%{p50:7.0f} ms{p99:7.0f} ms{outcome.imbalance:9.2f}×"
                f"{outcome.pick_us:11.0f}  {dict(outcome.whys) or ''}",
                flush=True,
            )

        for replicas in (1, 2, 4):
            world = World(KINDS[name], args.servers, args.seed)
            made = with_picker(world, replicas)
            on_end = None if args.ends_unknown else made.end
            outcome = world.run(made.choose, args.requests, made.poll, on_end)
            show(f"picker, {replicas} replica{'s' * (replicas > 1)}", outcome)
            print(f"{'':24}{max(picker.num_blocks for picker in made.pickers)} blocks in the largest index")
        for way in simpler_ways(World(KINDS[name], 1, 0)):
            world = World(KINDS[name], args.servers, args.seed)
            show(way, world.run(simpler_ways(world)[way], args.requests))
        print()


if __name__ == "__main__":
    main()
