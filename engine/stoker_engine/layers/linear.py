"""Linear layers. One module may hold several of a checkpoint's matrices, which run as one GEMM where their
formats permit it.

Under tensor parallelism (Shoeybi et al., 2019) a matrix is split in one of two ways:

    by outputs (column parallel)    each rank computes some outputs from all inputs       q, k, v, gate, up
    by inputs (row parallel)        each rank computes partial sums of all outputs,       o, down
                                    which an all-reduce adds up

An attention or MLP block consists of one of each, so it needs a single all-reduce, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stoker_common.errors import ModelError
from stoker_engine.kernels.bundle import Activations, Operation, RowFormat
from stoker_engine.kernels.w8a8_panels import W8A8Linear
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.quant.method import LinearMethod, Products
from stoker_engine.quant.prepack import resolve_prepack
from stoker_engine.quant.segments import merged
from stoker_engine.quant.weight_target import Shard, WeightTarget


class MergedLinear(nn.Module):
    """y = x Wᵀ + b, with W the concatenation of named parts along the output.

    WeightTargets: ``prefix.part.weight`` and ``prefix.part.bias``, and ``prefix.part.columns`` if the format stores a
    column order.

    Args:
        inputs: this rank's shard of x's columns; if it is not the whole, the results are all-reduced (see `reduce`).
        parts: for each named part, in order, the outputs that this rank computes (``{"q": …, "k": …, "v": …}``).
        reduce: if False, the caller does the all-reduce, and there must be no bias.
        space: row space of x.

    Raises:
        ModelError: the matrix's storage format cannot be split by inputs in this way.
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        inputs: Shard,
        parts: Mapping[str, Shard],
        bias: bool,
        reduce: bool = True,
        space: RowSpace = RowSpace.TOKENS,
    ) -> None:
        super().__init__()
        self._inputs = inputs
        self._parts = {f"{prefix}.{name}" if prefix else name: share for name, share in parts.items()}
        methods = [build.linear([f"{name}.weight"]) for name in self._parts]
        if not inputs.is_whole:
            self._check_cut(build, methods, inputs)
        size = sum(share.size for share in parts.values())
        stored = [(method, share.size) for method, share in zip(methods, parts.values(), strict=True)]
        self.matrix: Products = merged(stored, inputs.size, build.dtype, build.kernels)
        self.bias = nn.Parameter(torch.empty(size, dtype=build.dtype), requires_grad=False) if bias else None
        is_reduced = reduce and not inputs.is_whole
        unextended = self.matrix.linear(None if is_reduced else self._bias)
        linear = build.extended(unextended, self._parts, inputs, space)
        self._unextended = unextended if linear is unextended else None
        self._linear: Callable[[Any], torch.Tensor] = self._reduced(linear, build) if is_reduced else linear

    @property
    def linear(self) -> Operation:
        """The operation of `forward`, resolved by `resolve_prepack`; read it after the weights are prepacked."""
        return resolve_prepack(self._linear)

    @property
    def row_format(self) -> RowFormat | None:
        """Format of the `QuantizedRows` that `forward` also takes; None if it takes none. Read it after the weights are
        prepacked. With adapters it takes none, since they multiply x itself."""
        linear = None if self._unextended is None else resolve_prepack(self._unextended)
        return linear.row_format if isinstance(linear, W8A8Linear) else None

    def _check_cut(self, build: Build, methods: Sequence[LinearMethod], inputs: Shard) -> None:
        for name, method in zip(self._parts, methods, strict=True):
            if method.whole_columns:
                raise ModelError(
                    f"{name} is stored in activation order (act order), "
                    f"so it cannot be split across {build.ranks.size} ranks; choose --tensor-parallel-size 1"
                )
            if any(at % method.column_multiple for at in (inputs.start, inputs.stop) if at != inputs.full):
                sizes = range(2, build.ranks.size)
                shared = ["1", *(str(n) for n in sizes if inputs.full % (n * method.column_multiple) == 0)]
                raise ModelError(
                    f"{name} is stored in blocks of {method.column_multiple} columns, which cannot be split across "
                    f"{build.ranks.size} ranks; choose --tensor-parallel-size {' or '.join(shared)}"
                )

    def _reduced(self, linear: Operation, build: Build) -> Operation:
        bias, all_reduce = self._bias, build.ranks.all_reduce
        if bias is None:
            return lambda x: all_reduce(linear(x))
        return lambda x: all_reduce(linear(x)) + bias

    @property
    def _bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.data

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        targets, start = {}, 0
        for name, rows in self._parts.items():
            targets[f"{name}.weight"] = self.matrix.weight_target(start, rows, self._inputs)
            if (columns := self.matrix.columns_target(start)) is not None:
                targets[f"{name}.columns"] = columns
            if self.bias is not None:
                targets[f"{name}.bias"] = WeightTarget.of(self.bias.data[start : start + rows.size], rows)
            start += rows.size
        return targets

    def forward(self, x: Activations) -> torch.Tensor:
        """[tokens, inputs] → [tokens, outputs of all parts]. See `row_format`."""
        return self._linear(x)

    __call__ = forward
