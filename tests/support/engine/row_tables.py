"""Test adapters: vectors that linear operations add, a different one for each request.

The added vector depends only on the row of the batch, so an operation that uses the wrong row, in any row space,
changes the output. Each table is sharded like the operation's outputs.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.cpu.matrix import ADD_TO_LINEAR, CpuLinear
from stoker_engine.layers.batch_rows import BatchRows, RowSpace
from stoker_engine.layers.linear_site import LinearSite, SiteForm


@dataclass
class RowTables:
    """Adds `table[adapter]` to the output of each linear operation.

    Attributes:
        num_adapters: number of rows of the tables; requests without an adapter get zeros.
        only: adapter of all rows regardless of the batch, to compute the expected output of a request.
        scale: factor of the added vectors.
        numbers: the adapter in each slot; None if slots are adapters.
        seen: row spaces of the operations that ran.
        library: library of CPU kernels in which whole layers look up the operations; None to run them one by one.
    """

    num_adapters: int
    only: int | None = None
    scale: float = 0.3
    library: ctypes.CDLL | None = None
    numbers: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.seen: set[RowSpace] = set()

    def __call__(self, linear: Operation, site: LinearSite, rows: BatchRows) -> Operation:
        """See `ExtendLinear`."""
        if site.form in (SiteForm.ABSORBED_KEYS, SiteForm.ABSORBED_VALUES):
            return linear  # its outputs are per head
        table = torch.cat([self._table(name, site) for name in site.outputs], dim=1)

        def added() -> torch.Tensor:
            self.seen.add(site.space)
            adapters = self._in_slots(rows.adapters_of(site.space))
            return table[adapters if self.only is None else torch.full_like(adapters, self.only)]

        if isinstance(linear, CpuLinear) and self.library is not None:
            return self._native(linear, site, rows, table)
        return lambda x: (y := linear(x)) + added().to(y.dtype)

    def _in_slots(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self.numbers is None else self.numbers[slots]

    def _table(self, name: str, site: LinearSite) -> torch.Tensor:
        """Return the table [adapters + 1, this rank's outputs]; the last row is zeros."""
        shard = site.outputs[name]
        # The ranks' results are summed, so only one of them adds.
        if site.inputs.start:
            return torch.zeros(self.num_adapters + 1, shard.size)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        table = torch.randn(self.num_adapters + 1, shard.full, generator=generator) * self.scale
        table[-1] = 0
        return table[:, shard.start : shard.stop]

    def _native(self, linear: CpuLinear, site: LinearSite, rows: BatchRows, table: torch.Tensor) -> CpuLinear:
        """Return a function that C++ calls with only the row numbers."""
        assert self.library is not None
        outputs, dtype = linear.matrix.outputs, linear.dtype

        @ADD_TO_LINEAR
        def add(context: Any, is_bf16: int, arguments: Any) -> None:
            self.seen.add(site.space)
            args = arguments.contents
            batch_rows = torch.tensor((ctypes.c_int64 * args.rows).from_address(args.batch_rows), dtype=torch.int64)
            adapters = self._in_slots(rows.adapters[batch_rows])
            if self.only is not None:
                adapters = torch.full_like(adapters, self.only)
            elements = (args.rows - 1) * args.y_stride + outputs
            memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(args.y)
            y = torch.frombuffer(memory, dtype=dtype).as_strided((args.rows, outputs), (args.y_stride, 1))
            y += table[adapters].to(dtype)

        return linear.extended(self.library, add, None, lambda: rows[site.space])
