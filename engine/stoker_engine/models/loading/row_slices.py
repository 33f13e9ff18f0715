"""Read only this rank's rows of a tensor that several targets share or whose rows must be reordered.

The operations on such a tensor only move rows (`Destination.moves_rows`). Applied to row indices instead of rows, they
yield the file's rows that a target needs, in the target's order:

    rows of the file      0 1 2 3 4 5 6 7         half-split pairs of one head, and the upper half of them:
    of the whole target     0 2 4 6 1 3 5 7
    of the rank's part            ─────── 1 3 5 7
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from stoker_common.errors import WeightsError
from stoker_engine.models.loading.weight_source import WeightSource, check_shape
from stoker_engine.quant.weight_target import WeightTarget


def read_rows(
    source: WeightSource,
    name: str,
    parts_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    targets: Sequence[WeightTarget],
) -> None:
    """Fill each of `targets` with its part of the tensor `name`.

    Args:
        parts_of: splits the tensor into one part for each target; it may only move rows.

    Raises:
        WeightsError: a part and its target differ in shape, or the number of parts is wrong.
    """
    shape = source.shape(name)
    leading = shape[:-1] if len(shape) > 1 else shape  # the rows of a vector are single elements
    numbers = torch.arange(math.prod(leading)).view(*leading, *[1] * (len(shape) > 1))
    parts = parts_of(numbers)
    if len(parts) != len(targets):
        raise WeightsError(f"{name} contains {len(parts)} weights, but the model needs {len(targets)}")
    needed = [_rows_of(name, part, shape, target) for target, part in zip(targets, parts, strict=True)]
    for together in _grouped([each for each in needed if each.numbers.numel()]):
        numbers, order = torch.cat([each.numbers for each in together]).sort()
        columns, stored = together[0].columns, together[0].target.stored
        runs = (source.read(name, (*run, *columns), stored) for run in _runs(numbers, leading))
        found = torch.cat([each.flatten(0, len(leading) - 1) for each in runs])
        for each, part in zip(together, order.argsort().split([len(e.numbers) for e in together]), strict=True):
            each.target.tensor.copy_(found[part].view(each.target.tensor.shape))


class _NeededRows(NamedTuple):
    """The rows that a target needs.

    Attributes:
        target: target to fill.
        numbers: int64 row indices in the file, in the target's order.
        columns: slice of each row; empty if rows are single elements.
    """

    target: WeightTarget
    numbers: torch.Tensor
    columns: tuple[slice, ...]


def _rows_of(name: str, part: torch.Tensor, shape: torch.Size, target: WeightTarget) -> _NeededRows:
    if len(shape) == 1:
        check_shape(name, part.shape, target)
        return _NeededRows(target, (part if target.shard is None else part[target.shard]).flatten(), ())
    whole = torch.Size([*part.shape[:-1], shape[-1]])
    check_shape(name, whole, target)
    shard = target.shard or tuple(slice(0, size) for size in whole)
    return _NeededRows(target, part[shard[:-1]].flatten(), (shard[-1],))


def _grouped(needed: Sequence[_NeededRows]) -> Iterator[list[_NeededRows]]:
    """Group consecutive targets, so that the rows of a group are read in file order. A target starts a new group if all
    its rows come after the group's in the file, or if its columns or format differ from the group's."""
    together: list[_NeededRows] = []
    for each in needed:
        apart = not together or max(int(e.numbers.max()) for e in together) < int(each.numbers.min())
        if together and (
            apart or (each.columns, each.target.stored) != (together[0].columns, together[0].target.stored)
        ):
            yield together
            together = []
        together.append(each)
    if together:
        yield together


def _runs(numbers: torch.Tensor, leading: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the `leading` dimensions that cover the rows with the ascending indices `numbers`."""
    inner = leading[-1]
    breaks = (numbers.diff() != 1) | (numbers[1:] % inner == 0)
    starts = [0, *(breaks.nonzero().flatten() + 1).tolist()] if len(numbers) else []
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=False):
        first, size = int(numbers[start]), stop - start
        outer = torch.unravel_index(torch.tensor(first // inner), leading[:-1]) if len(leading) > 1 else ()
        yield (*(slice(int(index), int(index) + 1) for index in outer), slice(first % inner, first % inner + size))
