"""The workloads by name: W1 to W3 (`workloads`), decode only and prefill only.

decode-N   N concurrent requests, 8 tokens in, 64 out: contexts are short, so that mostly weights are read
prefill-N  1 request, N tokens in, 1 out; its speed counts prompt tokens, that of all others output tokens
long       prefills of thousands of tokens; engines are restarted for them, with room for one sequence
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from workloads import Workload, workloads

#: Names for the command line, and the workloads they stand for.
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "W1": ("W1",),
    "W2": ("W2",),
    "W3": ("W3",),
    "decode": tuple(f"decode-{streams}" for streams in (1, 2, 4, 8, 16, 32)),
    "prefill": ("prefill-256", "prefill-1024"),
    "long": ("prefill-4000", "prefill-8000", "prefill-16000"),
}


@dataclass(frozen=True)
class Room:
    """Lengths and concurrency that engines are started for.

    Attributes:
        longest: tokens of the longest sequence, prompt and output.
        at_once: number of concurrent sequences.
    """

    longest: int
    at_once: int

    def holds(self, workload: Workload) -> bool:
        """Return whether all sequences of a workload fit."""
        return all(len(prompt) + out <= self.longest for prompt, out in workload.requests)


ROOM: Final = Room(1152, 32)
#: The room of GROUPS["long"].
LONG_ROOM: Final = Room(16_064, 1)


def by_room(names: list[str]) -> list[tuple[Room, list[str]]]:
    """Group workloads by the room that engines are started for."""
    long = [name for name in names if name in GROUPS["long"]]
    return [(room, some) for room, some in ((ROOM, [n for n in names if n not in long]), (LONG_ROOM, long)) if some]


def expand(names: list[str]) -> list[str]:
    """Return the workloads of groups, or of single names such as ``decode-8``.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    singles = [name for group in GROUPS.values() for name in group]
    found: list[str] = []
    for name in names:
        if name not in GROUPS and name not in singles:
            some = f"{', '.join(GROUPS)}, or one of {', '.join(n for n in singles if n not in GROUPS)}"
            raise ValueError(f"no workload {name!r}; there are {some}")
        found += GROUPS.get(name, (name,))
    return list(dict.fromkeys(found))


def workload(name: str, seed: int) -> Workload:
    """Return one of `expand`'s workloads, with different tokens for each seed, so that no cache entry is reused."""
    kind, _, number = name.partition("-")
    tokens = random.Random(f"{name} {seed}")
    if kind == "decode":
        return Workload(name, [(_prompt(tokens, 8), 64) for _ in range(int(number))])
    if kind == "prefill":
        return Workload(name, [(_prompt(tokens, int(number)), 1)])
    return workloads(seed)[name]


def warm_up(seed: int) -> Workload:
    """Return four short requests, which trigger an engine's lazy allocations and compilations."""
    tokens = random.Random(f"warm-up {seed}")
    return Workload("warm-up", [(_prompt(tokens, 64), 8) for _ in range(4)])


def counted_tokens(of: Workload) -> int:
    """Return the number of tokens that the speed counts."""
    if of.name.startswith("prefill"):
        return sum(len(prompt) for prompt, _ in of.requests)
    return of.num_output_tokens


def _prompt(tokens: random.Random, length: int) -> list[int]:
    return [tokens.randrange(1000, 40_000) for _ in range(length)]
