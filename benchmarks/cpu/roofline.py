"""The roofline: the least time of a workload on a machine.

The larger of two ceilings applies:

    GEMM    every token needs the weights of the body, sampled tokens also those of the head, two operations per weight;
            a prefix shared by all requests counts once
    memory  every step reads all weights, and there are at least as many steps as the longest output has tokens

Attention and the KV cache are ignored, which only makes the least time smaller: by little for short contexts, by much
for a prompt of 16,000 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from machine import Machine
from workloads import Workload

from cpu.models import Model


@dataclass(frozen=True)
class Least:
    """Least work of a workload.

    Attributes:
        operations: floating-point operations.
        bytes_read: bytes of weights.
    """

    operations: int
    bytes_read: int

    def seconds(self, machine: Machine) -> float:
        """Return the least time on a machine, in seconds."""
        return max(self._computing(machine), self._reading(machine))

    def ceiling(self, machine: Machine) -> str:
        """Return the ceiling that applies: ``GEMM`` or ``memory``."""
        return "GEMM" if self._computing(machine) > self._reading(machine) else "memory"

    def _computing(self, machine: Machine) -> float:
        return self.operations / machine.gemm_flops

    def _reading(self, machine: Machine) -> float:
        return self.bytes_read / machine.read_bytes


def least(workload: Workload, model: Model) -> Least:
    """Return the least operations and reads of a workload."""
    prompts = [prompt for prompt, _ in workload.requests]
    outs = [out for _, out in workload.requests]
    shared = _shared_prefix(prompts) if len(prompts) > 1 else 0
    tokens = shared + sum(len(prompt) - shared for prompt in prompts) + sum(out - 1 for out in outs)
    operations = 2 * (model.body * tokens + model.head * sum(outs))
    return Least(operations, max(outs) * model.weight_bytes)


def _shared_prefix(prompts: list[list[int]]) -> int:
    """Return the length of the prefix that all prompts share, in tokens."""
    return next(
        (position for position, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1),
        min(map(len, prompts)),
    )
