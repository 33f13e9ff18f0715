"""The registry of runtimes. The catalogue has their images."""

from __future__ import annotations

from typing import Final

from stoker_operator.api.violation import Refused, Violation
from stoker_operator.runtimes.runtime import Runtime
from stoker_operator.runtimes.stoker import Stoker
from stoker_operator.runtimes.vllm import Vllm

RUNTIMES: Final[dict[str, Runtime]] = {each.name: each for each in (Stoker(), Vllm())}


def runtime(name: str) -> Runtime:
    """Return the runtime with this name.

    Raises:
        Refused: there is no such runtime.
    """
    if name in RUNTIMES:
        return RUNTIMES[name]
    raise Refused(
        Violation(
            "spec.engine.runtime",
            f"there is no runtime {name}",
            f"use {' or '.join(sorted(RUNTIMES))}",
            reason="UnknownRuntime",
        )
    )
