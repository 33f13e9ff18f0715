"""Goals of single figures: fixed values, which were set for an H100 with 80 GB, or relative to other figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpu_parts.figures import TIMES, Figure

#: (the figure, all figures by key) → the value to reach; None: a figure that it depends on was not measured.
Goal = Callable[[Figure, Mapping[str, Figure]], float | None]


def fixed(value: float) -> Goal:
    """Return a goal that is a value in the figure's unit."""
    return lambda figure, figures: value


def of_other(key: str, factor: float) -> Goal:
    """Return the goal to reach `factor` times the speed of another figure in the same unit."""

    def goal(figure: Figure, figures: Mapping[str, Figure]) -> float | None:
        other = figures.get(key)
        return None if other is None else _times(figure, other.value, factor)

    return goal


def of_best_peer(factor: float) -> Goal:
    """Return the goal to reach `factor` times the best peer's speed."""

    def goal(figure: Figure, figures: Mapping[str, Figure]) -> float | None:
        if not figure.peers:
            return None
        best = min(figure.peers.values()) if figure.unit in TIMES else max(figure.peers.values())
        return _times(figure, best, factor)

    return goal


def of_bandwidth(share: float) -> Goal:
    """Return the goal to move the figure's least bytes at this share of a copy's bandwidth, in milliseconds."""

    def goal(figure: Figure, figures: Mapping[str, Figure]) -> float | None:
        copy = figures.get("machine/copy")
        return None if copy is None else figure.least_bytes / (copy.value * share) / 1e6

    return goal


def _times(figure: Figure, value: float, factor: float) -> float:
    return value / factor if figure.unit in TIMES else value * factor


_BIG, _SMALL = "Llama-3-8B", "Qwen3-0.6B"

GOALS: dict[str, Goal] = {
    f"steps/{_BIG}/bf16/1": fixed(6.3),
    f"steps/{_BIG}/bf16/64": fixed(8.3),
    f"steps/{_BIG}/int4/1": fixed(3.2),
    f"steps/{_BIG}/int4/64": fixed(6.8),
    f"steps/{_BIG}/fp8/1": fixed(4.2),
    f"steps/{_BIG}/fp8/64": fixed(6.8),
    f"prompts/{_BIG}/fp8/2048": of_other(f"prompts/{_BIG}/bf16/2048", 1.3),
    f"prompts/{_BIG}/fp8/8192": of_other(f"prompts/{_BIG}/bf16/8192", 1.3),
    f"prompts/{_BIG}/int4/2048": of_other(f"prompts/{_BIG}/bf16/2048", 0.85),
    f"prompts/{_BIG}/int4/8192": of_other(f"prompts/{_BIG}/bf16/8192", 0.95),
    f"nano-vllm/{_SMALL}/bf16/sync": fixed(16_000),
    f"nano-vllm/{_SMALL}/bf16/async": fixed(16_000),
    f"sharegpt/{_BIG}/bf16": fixed(14_000),
    f"server/{_BIG}/start": fixed(10),
    f"server/{_BIG}/tpot": fixed(10.5),
    f"busy/{_SMALL}/256": fixed(95),
    **{f"attention/prefill/{length}/16": of_best_peer(0.9) for length in (2048, 8192, 32768)},
    "attention/decode/1x32768/16": of_bandwidth(0.60),
    "attention/decode/8x8192/16": of_bandwidth(0.80),
    **{f"mixture/Qwen3-30B-A3B/{tokens}": of_best_peer(0.9) for tokens in (1, 64, 2048)},
}


def goal_of(figure: Figure, figures: Mapping[str, Figure]) -> float | None:
    """Return the goal of a figure in its unit, if it has one."""
    goal = GOALS.get(figure.key)
    return None if goal is None else goal(figure, figures)


def reaches(figure: Figure, goal: float) -> bool:
    """Whether a figure reaches its goal."""
    return figure.value <= goal if figure.unit in TIMES else figure.value >= goal
