"""The matrices of all slots of one operation, where they are multiplied for all rows at once (`GroupedLora`).

    A      [slots, parts, heads or 1, max rank, inner]           by which rows are multiplied first
    B      [slots, heads or 1, all parts' outputs, max rank]     and by this their results
    ranks  [slots, parts]                                        how much of both a slot's adapter has

They stay where they are while adapters come and go, so a CUDA graph that was captured once is right for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels.bundle import GroupedLora, Kernels
from stoker_engine.kernels.lora import LoraPart
from stoker_engine.layers.batch_rows import BatchRows, RowSpace
from stoker_engine.layers.linear_site import SiteForm
from stoker_engine.parallel.transfer import to_device
from stoker_engine.sizing.lora import changeable, is_changeable


@dataclass(frozen=True)
class GroupedAdapters:
    """How adapters are computed for all rows at once.

    Attributes:
        kernels: that compute them.
        max_rank: the largest rank of a matrix.
        is_changeable: whether adapters may change the matrix of this name; there is no room for others.
        is_batch_invariant: whether a row's bits must not depend on which adapters are in slots.
    """

    kernels: GroupedLora
    max_rank: int
    is_changeable: Callable[[str], bool]
    is_batch_invariant: bool = False


def grouped_adapters(args: EngineArgs, config: ModelConfig, kernels: Kernels) -> GroupedAdapters | None:
    """How adapters of a model are computed for all rows at once; None: these kernels do not."""
    if kernels.lora is None:
        return None
    allowed = changeable(config, args.lora_target_modules)
    return GroupedAdapters(
        kernels.lora, args.max_lora_rank, lambda name: is_changeable(name, allowed), args.batch_invariant
    )


class StackShape(NamedTuple):
    """The sizes of an operation, of which adapters may change some parts.

    Attributes:
        form: what it does with its matrices.
        heads: of its argument; 1 but where latent attention's matrices are absorbed.
        inner: columns of the matrix that rows are multiplied by first; of the embedding, tokens.
        parts: the first output of each part, and how many outputs it has.
    """

    form: SiteForm
    heads: int
    inner: int
    parts: tuple[tuple[int, int], ...]


class SlotStacks:
    """The matrices of an operation, and what they add to its result.

    Args:
        num_slots: of adapters.
        dtype: of their matrices.
        device: that they are on.
    """

    def __init__(
        self, shape: StackShape, grouped: GroupedAdapters, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._grouped, self._num_slots, self._dtype = shape, grouped, num_slots, dtype
        form, max_rank, parts = shape.form, grouped.max_rank, len(shape.parts)
        self._first_rows, tiles = list[int](), list[list[int]]()
        size, outputs = grouped.kernels.output_tile(dtype), 0
        for part, (first, width) in enumerate(shape.parts):
            behind = outputs - first
            tiles += [[at, min(at + size, first + width), part, behind] for at in range(first, first + width, size)]
            self._first_rows.append(outputs)
            outputs += width
        heads_a = shape.heads if form is SiteForm.ABSORBED_KEYS else 1
        heads_b = shape.heads if form is SiteForm.ABSORBED_VALUES else 1
        a_size = (shape.inner, max_rank) if form is SiteForm.EMBEDDING else (parts, heads_a, max_rank, shape.inner)
        # Slots are filled between steps, in inference mode or not, which torch permits for usual tensors alone.
        with torch.inference_mode(False):
            # Zeros, though nothing reads them: whatever were there could be nan, which a lookup would copy.
            self._a = torch.zeros((num_slots, *a_size), dtype=dtype, device=device)
            self._b = torch.zeros((num_slots, heads_b, outputs, max_rank), dtype=dtype, device=device)
            self._ranks = torch.zeros((num_slots, parts), dtype=torch.int32, device=device)
            self._output_tiles = to_device(tiles, device, torch.int32).view(-1, 4)

    def set(self, slot: int, parts: Sequence[LoraPart]) -> None:
        """Has a slot hold these parts from the next step on; copies go on when this returns."""
        self._ranks[slot].zero_()
        index_of = {first: index for index, (first, _) in enumerate(self._shape.parts)}
        for a, b, first in parts:
            index, rank = index_of[first], b.shape[-1]
            for to, matrix in zip(self._views(slot, index, rank), self._factors(a, b), strict=True):
                assert to.shape == matrix.shape
                to.copy_(matrix, non_blocking=True)
            self._ranks[slot, index].fill_(rank)

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: BatchRows, space: RowSpace) -> None:
        """Adds to y, the operation's result for x, what each row's adapter makes of x."""
        kernels = self._grouped.kernels
        tiles = rows.grouped(space, lambda slots: kernels.group(slots, self._num_slots, self._dtype))
        if self._shape.form is SiteForm.EMBEDDING:
            slots = rows.adapters_of(space).clamp_min(0)
            shrunk = self._a[slots, x].float()[:, None, None, None]
        else:
            by_head = x.to(self._dtype)
            shrunk = kernels.shrink(by_head if x.dim() == 3 else by_head.unsqueeze(1), self._a, self._ranks, *tiles)
        kernels.expand(y if y.dim() == 3 else y.unsqueeze(1), shrunk, self._b, self._ranks, self._output_tiles, *tiles)

    def _views(self, slot: int, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of one part of a slot."""
        first, size = self._first_rows[part], self._shape.parts[part][1]
        a = self._a[slot, :, :rank] if self._shape.form is SiteForm.EMBEDDING else self._a[slot, part, :, :rank]
        return a, self._b[slot, :, first : first + size, :rank]

    def _factors(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An adapter's A and B as they are multiplied."""
        if self._shape.form is SiteForm.EMBEDDING:
            return a, b.unsqueeze(0)
        if self._shape.form is SiteForm.ABSORBED_KEYS:  # queries by B of their heads, and then by A
            return b.transpose(1, 2), a.T.unsqueeze(0)
        return a.unsqueeze(0), (b if self._shape.form is SiteForm.ABSORBED_VALUES else b.unsqueeze(0))
