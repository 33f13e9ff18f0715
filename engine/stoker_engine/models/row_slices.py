"""Reads of a tensor that several slots share, or whose rows are in another order, what a rank holds of it.

What takes such a tensor apart only moves its rows about (`MovesRows`). Applied to the rows' numbers instead of the
rows, it says which rows of the file a slot needs, and in which order:

    rows of the file      0 1 2 3 4 5 6 7         half-split pairs of one head, and the upper half of them:
    of the whole slot     0 2 4 6 1 3 5 7
    of the rank's part            ─────── 1 3 5 7
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from stoker_engine.contract.errors import WeightsError
from stoker_engine.models.weight_source import WeightSource, check_shape
from stoker_engine.quant.slot import Slot


def read_rows(
    source: WeightSource, name: str, parts_of: Callable[[torch.Tensor], Sequence[torch.Tensor]], slots: Sequence[Slot]
) -> None:
    """Fills each of `slots` with its part of the tensor called `name`.

    Args:
        parts_of: takes the tensor apart, one part a slot, by moving rows about.

    Raises:
        WeightsError: a part has another shape than its slot.
    """
    shape = source.shape(name)
    leading = shape[:-1] if len(shape) > 1 else shape  # a vector is a row of one number each
    numbers = torch.arange(math.prod(leading)).view(*leading, *[1] * (len(shape) > 1))
    parts = parts_of(numbers)
    if len(parts) != len(slots):
        raise WeightsError(f"{name} holds {len(parts)} weights, the model needs {len(slots)}")
    for slot, part in zip(slots, parts, strict=True):
        whole = part.shape if len(shape) == 1 else torch.Size([*part.shape[:-1], shape[-1]])
        check_shape(name, whole, slot)
        shard = slot.shard or tuple(slice(0, size) for size in whole)
        columns = () if len(shape) == 1 else (shard[-1],)
        rows = part[shard] if len(shape) == 1 else part[shard[:-1]]
        if not rows.numel():
            continue
        ordered, order = rows.flatten().sort()
        found = torch.cat(
            [
                source.read(name, (*run, *columns), slot.stored).flatten(0, len(leading) - 1)[wanted]
                for run, wanted in _runs(ordered, leading)
            ]
        )
        slot.tensor.copy_(found[order.argsort()].view(slot.tensor.shape))


def _runs(numbers: torch.Tensor, leading: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """Slices of the `leading` dimensions that hold the rows of these `numbers`, which ascend, and which of the slice's
    rows they are. Of rows that take turns with another slot's, those are read, too: sooner than each row alone."""
    inner = leading[-1]
    breaks = (numbers.diff() > 2) | (numbers[1:] // inner != numbers[:-1] // inner)
    starts = [0, *(breaks.nonzero().flatten() + 1).tolist()] if len(numbers) else []
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=False):
        first, last = int(numbers[start]), int(numbers[stop - 1])
        outer = torch.unravel_index(torch.tensor(first // inner), leading[:-1]) if len(leading) > 1 else ()
        at = (*(slice(int(index), int(index) + 1) for index in outer), slice(first % inner, last % inner + 1))
        yield at, numbers[start:stop] - first
