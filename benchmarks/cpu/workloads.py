"""What is run, by name: W1 to W3 (`workloads`), decoding alone and reading prompts alone.

decode-N   N requests at once, 8 tokens in, 64 out: short contexts, so that hardly more than the weights is read
prefill-N  1 request, N tokens in, 1 out; its speed is of the tokens in, all others' of the tokens out
long       such requests of thousands of tokens; engines are started again for them, with one sequence's room
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from workloads import Workload, workloads

#: A name that can be asked for → the workloads it stands for.
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
    """What engines are started for.

    Attributes:
        longest: tokens of the longest sequence, prompt and output.
        at_once: sequences.
    """

    longest: int
    at_once: int

    def holds(self, workload: Workload) -> bool:
        """Whether all sequences of a workload are short enough."""
        return all(len(prompt) + out <= self.longest for prompt, out in workload.requests)


ROOM: Final = Room(1152, 32)
#: The same for GROUPS["long"].
LONG_ROOM: Final = Room(16_064, 1)


def by_room(names: list[str]) -> list[tuple[Room, list[str]]]:
    """Workloads that engines can be started for together."""
    long = [name for name in names if name in GROUPS["long"]]
    return [(room, some) for room, some in ((ROOM, [n for n in names if n not in long]), (LONG_ROOM, long)) if some]


def expand(names: list[str]) -> list[str]:
    """Workloads for what was asked: groups, or single workloads such as ``decode-8``.

    Raises:
        ValueError: there is none of that name; says which there are.
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
    """One of `expand`'s, of fresh tokens for each seed, so that no cache carries over."""
    kind, _, number = name.partition("-")
    tokens = random.Random(f"{name} {seed}")
    if kind == "decode":
        return Workload(name, [(_prompt(tokens, 8), 64) for _ in range(int(number))])
    if kind == "prefill":
        return Workload(name, [(_prompt(tokens, int(number)), 1)])
    return workloads(seed)[name]


def warm_up(seed: int) -> Workload:
    """Four short requests, which make an engine allocate and compile what it does when first used."""
    tokens = random.Random(f"warm-up {seed}")
    return Workload("warm-up", [(_prompt(tokens, 64), 8) for _ in range(4)])


def counted_tokens(of: Workload) -> int:
    """The tokens that its speed is in."""
    if of.name.startswith("prefill"):
        return sum(len(prompt) for prompt, _ in of.requests)
    return of.num_output_tokens


def _prompt(tokens: random.Random, length: int) -> list[int]:
    return [tokens.randrange(1000, 40_000) for _ in range(length)]
