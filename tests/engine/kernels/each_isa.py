"""Run tests of the CPU's kernels for each ISA that this processor supports."""

from __future__ import annotations

from typing import Any, Final

import pytest

from stoker_engine.kernels.cpu.isa import usable_isas

#: The ISA other than this processor's widest from which CI selects cases: each needs minutes of compilation, and other
#: machines test their widest.
_DRAWN: Final = "avx2"


def each_isa() -> list[Any]:
    """Return parameters: the widest ISA, and the others as slow tests."""
    return [
        pytest.param(isa, id=isa.name, marks=[pytest.mark.slow(drawn=isa.name == _DRAWN)] * (n > 0))
        for n, isa in enumerate(usable_isas())
    ]
