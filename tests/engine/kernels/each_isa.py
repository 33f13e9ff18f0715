"""Tests of the CPU's kernels run for each ISA that this processor has."""

from __future__ import annotations

from typing import Any, Final

import pytest

from stoker_engine.kernels.cpu.isa import usable_isas

#: Of ISAs that are not this processor's widest, the one that CI draws from: each takes a compilation of minutes, and
#: other machines' widest are run there.
_DRAWN: Final = "avx2"


def each_isa() -> list[Any]:
    """Parameters: the widest ISA, and the others as slow tests."""
    return [
        pytest.param(isa, id=isa.name, marks=[pytest.mark.slow(drawn=isa.name == _DRAWN)] * (n > 0))
        for n, isa in enumerate(usable_isas())
    ]
