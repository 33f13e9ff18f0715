"""All parts, in the order in which they run: what bounds need, what is quick, then by value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gpu_parts.context import Context


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        limit_s: seconds after which it is ended; its figures until then are kept.
        load: returns its function, and imports what it needs.
    """

    name: str
    limit_s: float
    load: Callable[[], Callable[[Context], None]]


def _models() -> Callable[[Context], None]:
    from gpu_parts.models import make_models

    return make_models


def _machine() -> Callable[[Context], None]:
    from gpu_parts.machine_limits import measure

    return measure


def _attention() -> Callable[[Context], None]:
    from gpu_parts.attention import measure

    return measure


def _attention_packages() -> Callable[[Context], None]:
    from gpu_parts.attention import measure_packages

    return measure_packages


def _mixture() -> Callable[[Context], None]:
    from gpu_parts.mixture import measure

    return measure


def _steps(stored: str) -> Callable[[Context], None]:
    from gpu_parts.steps import measure

    return lambda context: measure(context, stored)


def _nano_vllm(is_async: bool) -> Callable[[Context], None]:
    from gpu_parts.nano_vllm import measure

    return lambda context: measure(context, is_async)


def _server() -> Callable[[Context], None]:
    from gpu_parts.server import measure

    return measure


def _peer(name: str) -> Callable[[Context], None]:
    from gpu_parts.peers import measure

    return lambda context: measure(context, name)


PARTS = (
    Part("machine", 30, _machine),
    Part("attention", 45, _attention),
    Part("mixture", 30, _mixture),
    Part("models", 60, _models),
    Part("steps-bf16", 100, partial(_steps, "bf16")),
    Part("nano-vllm-async", 60, partial(_nano_vllm, True)),
    Part("steps-int4", 60, partial(_steps, "int4")),
    Part("steps-fp8", 60, partial(_steps, "fp8")),
    Part("server", 70, _server),
    Part("nano-vllm-sync", 45, partial(_nano_vllm, False)),
    Part("attention-packages", 60, _attention_packages),
    Part("peer-vllm", 120, partial(_peer, "vllm")),
    Part("peer-sglang", 120, partial(_peer, "sglang")),
    Part("peer-transformers", 90, partial(_peer, "transformers")),
)

BY_NAME = {part.name: part for part in PARTS}

#: Parts without which later ones cannot run.
NEEDED = {"models"}
