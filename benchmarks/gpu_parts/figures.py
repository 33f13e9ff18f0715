"""What is measured: a figure, its settings, and the least work it takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Unit = Literal["ms", "s", "tok/s", "GB/s", "TFLOP/s", "%", "µs"]

#: Units of which less is better.
TIMES = ("ms", "s", "µs")

#: Arithmetic whose speed limits a figure: the name of a figure of the part ``machine``, without its prefix.
Arithmetic = Literal["gemm-bf16", "gemm-fp8"]


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        key: identifies the figure: ``part/model/format/case``.
        title: what was measured, for readers.
        settings: the settings of the engine, and whatever else the value depends on.
        least_bytes: bytes that must at least be read and written; 0: the bound does not depend on memory.
        least_flops: floating-point operations that are needed; 0: the bound does not depend on arithmetic.
        arithmetic: arithmetic of these operations.
        amount: what the least work produces, such as tokens, if the unit is a rate.
        peers: the same value measured with other software in the same run, by its name.
    """

    key: str
    title: str
    value: float
    unit: Unit
    settings: str = ""
    least_bytes: float = 0.0
    least_flops: float = 0.0
    arithmetic: Arithmetic = "gemm-bf16"
    amount: float = 1.0
    peers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorder:
    """Appends figures to a file of JSON lines, each as soon as it is measured."""

    file: Path

    def add(self, figure: Figure) -> None:
        """Append a figure."""
        with self.file.open("a") as lines:
            lines.write(json.dumps(asdict(figure)) + "\n")

    def read(self) -> list[Figure]:
        """Return all figures; an incomplete last line, whose process was killed, is ignored."""
        if not self.file.exists():
            return []
        lines = self.file.read_text().split("\n")[:-1]
        return [Figure(**json.loads(line)) for line in lines]
