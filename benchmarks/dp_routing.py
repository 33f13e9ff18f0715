"""Measure the data-parallel router: time of a decision, and prefix-cache hits compared with round robin.

The trace consists of seeded synthetic conversations. Each starts with one of a few system prompts; the prompt of a turn
is the conversation so far and a new question. Turns of all conversations come in random order. The router, block pools
and prefix caches are the real ones. There is no model: a fixed number of requests is in flight.

    python benchmarks/dp_routing.py [--engines 4]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker_common.block_hash import NO_KEYS, BlockHash, extend_chain
from stoker_engine.processes.dp_router import DPRouter
from stoker_engine.sched.block_pool import BlockPool
from stoker_engine.sched.prefix_cache import PrefixCache

BLOCK_SIZE = 16
VOCABULARY = 150_000


@dataclass(frozen=True)
class Routed:
    """Result of a routed trace.

    Attributes:
        hit_rate: fraction of all prompt tokens found in the engines' prefix caches.
        imbalance: prompt tokens computed by the busiest engine, as a multiple of the mean.
    """

    hit_rate: float
    imbalance: float


class Cache:
    """KV cache of one engine, with the prompts computed so far."""

    def __init__(self, num_blocks: int) -> None:
        self._prefixes = PrefixCache()
        self._pool = BlockPool(num_blocks, self._prefixes.forget)

    def compute(self, prompt: Sequence[int]) -> int:
        """Cache a prompt. Return how many of its tokens were already cached."""
        hashes = list[BlockHash]()
        extend_chain(hashes, prompt, BLOCK_SIZE, (len(prompt) - 1) // BLOCK_SIZE, NO_KEYS)
        held = list[int]()
        for each in hashes:
            block = self._prefixes.find(0, each)
            if block is None:
                break
            self._pool.acquire(block)
            held.append(block)
        hit = len(held)
        for each in hashes[hit:]:
            held += self._pool.allocate(1)
            self._prefixes.insert(0, each, held[-1])
        self._pool.release(reversed(held))
        return hit * BLOCK_SIZE


def conversations(seed: int, count: int = 60, turns: int = 6) -> Iterator[list[int]]:
    """Yield the prompts of a trace, in order."""
    chance = random.Random(seed)

    def words(length: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(length)]

    systems = [words(400) for _ in range(3)]
    texts = [[*chance.choice(systems)] for _ in range(count)]
    order = [each for each in range(count) for _ in range(turns)]
    chance.shuffle(order)
    for each in order:
        texts[each] += words(chance.randint(20, 200))
        yield [*texts[each]]
        texts[each] += words(chance.randint(50, 300))  # the answer


def decision_us(engines: int, prompt_tokens: int = 512, rounds: int = 2000) -> float:
    """Return the median time of one routing decision, with the start and end of its request, in µs."""
    chance = random.Random(0)
    router = DPRouter(engines, BLOCK_SIZE, 50_000, 256)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(prompt_tokens)] for _ in range(200)]
    took = []
    for number in range(rounds):
        began = time.perf_counter()
        router.begin(str(number), prompts[number % len(prompts)], 1, among=range(engines))
        router.mark_started(str(number))
        router.end(str(number))
        took.append(time.perf_counter() - began)
    return 1e6 * statistics.median(took)


def route(seed: int, engines: int, routed: bool, num_blocks: int = 2000, in_flight: int = 16) -> Routed:
    """Route a trace among engines, by the router or round robin."""
    router = DPRouter(engines, BLOCK_SIZE, num_blocks, 256)
    caches = [Cache(num_blocks) for _ in range(engines)]
    computed, hits, total = [0] * engines, 0, 0
    running: deque[str] = deque()
    for number, prompt in enumerate(conversations(seed)):
        engine = router.begin(str(number), prompt, 1, among=range(engines)) if routed else number % engines
        hit = caches[engine].compute(prompt)
        hits, total = hits + hit, total + len(prompt)
        computed[engine] += len(prompt) - hit
        running.append(str(number))
        router.mark_started(str(number))
        if len(running) > in_flight:
            router.end(running.popleft())
    return Routed(hits / total, max(computed) / statistics.mean(computed))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4, 8])
    for engines in parser.parse_args().engines:
        print(f"{engines} engines: {decision_us(engines):.0f} µs to choose for 512 prompt tokens")
        for name, routed in (("router", True), ("round robin", False)):
            results = [route(seed, engines, routed) for seed in range(3)]
            rate = statistics.mean(result.hit_rate for result in results)
            imbalance = statistics.mean(result.imbalance for result in results)
            print(f"    {name:12} {100 * rate:5.1f}% of prompt tokens found, busiest engine {imbalance:.2f} × the mean")


if __name__ == "__main__":
    main()
