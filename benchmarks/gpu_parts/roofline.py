"""The roofline: the least time of a figure's work at the speeds that the part ``machine`` measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_parts.figures import TIMES, Figure

#: Seconds in a unit of time.
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


@dataclass(frozen=True)
class Roofline:
    """Speeds of a machine.

    Attributes:
        bandwidth: bytes/s of a copy, reads and writes both counted; 0: not measured.
        flops: FLOP/s of large GEMMs by `Figure.arithmetic`.
    """

    bandwidth: float
    flops: Mapping[str, float]

    @classmethod
    def of(cls, figures: list[Figure]) -> Roofline:
        """Return the speeds that are among the figures."""
        values = {figure.key.removeprefix("machine/"): figure.value for figure in figures}
        rates: dict[str, float] = {name: 1e12 * values[name] for name in ("gemm-bf16", "gemm-fp8") if name in values}
        return cls(1e9 * values.get("copy", 0.0), rates)

    def bound(self, figure: Figure) -> float | None:
        """Return the best possible value of a figure, in its unit: the longer of the time for its bytes and for its
        operations. None: there is no bound, or a speed was not measured."""
        times = []
        if figure.least_bytes:
            times.append(figure.least_bytes / self.bandwidth if self.bandwidth else None)
        if figure.least_flops:
            rate = self.flops.get(figure.arithmetic)
            times.append(figure.least_flops / rate if rate else None)
        known = [time for time in times if time is not None]
        if not known or len(known) < len(times):
            return None
        seconds = max(known)
        return seconds / SECONDS[figure.unit] if figure.unit in TIMES else figure.amount / seconds
