"""The least time in which a workload can be done on a machine, and so a speed's share of it.

Two ceilings, of which the one that takes longer holds:

    GEMM    every token goes through the body's weights, and those that another token is drawn from through the head's:
            two operations a weight; a prefix that all requests share counts once
    memory  every step reads all weights, and there are at least as many steps as the longest output has tokens

Attention and the KV cache are left out, which makes the least time less, never more: by little where contexts are
short, by much in a prompt of 16,000 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from machine import Machine
from workloads import Workload

from cpu.models import Model


@dataclass(frozen=True)
class Least:
    """Attributes:
    operations: floating-point operations.
    bytes_read: of weights.
    """

    operations: int
    bytes_read: int

    def seconds(self, machine: Machine) -> float:
        """The least time on a machine."""
        return max(self._computing(machine), self._reading(machine))

    def ceiling(self, machine: Machine) -> str:
        """Which of the two holds: ``GEMM`` or ``memory``."""
        return "GEMM" if self._computing(machine) > self._reading(machine) else "memory"

    def _computing(self, machine: Machine) -> float:
        return self.operations / machine.gemm_flops

    def _reading(self, machine: Machine) -> float:
        return self.bytes_read / machine.read_bytes


def least(workload: Workload, model: Model) -> Least:
    """What has to be computed and read at least."""
    prompts = [prompt for prompt, _ in workload.requests]
    outs = [out for _, out in workload.requests]
    shared = _shared_prefix(prompts) if len(prompts) > 1 else 0
    tokens = shared + sum(len(prompt) - shared for prompt in prompts) + sum(out - 1 for out in outs)
    operations = 2 * (model.body * tokens + model.head * sum(outs))
    return Least(operations, max(outs) * model.weight_bytes)


def _shared_prefix(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with."""
    return next(
        (position for position, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1),
        min(map(len, prompts)),
    )
