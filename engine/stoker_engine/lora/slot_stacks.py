"""Matrices of all slots for one operation, for kernels that compute all rows at once (`GroupedLora`).

    A      [slots, parts, heads or 1, max rank, inner]           multiplies the rows; for the embedding, A is
                                                                 [slots, vocabulary, max rank] and is indexed
    B      [slots, heads or 1, outputs of all parts, max rank]   multiplies the results of A
    ranks  [slots, parts]                                        rank of the slot's adapter; 0: no change

For absorbed keys, an adapter's B is stored in A, and its A in B. The tensors' addresses do not change when adapters are
activated, so a captured CUDA graph is valid for all adapters.
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
    """Configuration of the adapters of a model whose kernels compute all rows at once.

    Attributes:
        max_rank: maximum rank of a matrix.
        is_changeable: parameter name without ``.weight`` → whether adapters may change the matrix; no memory is
            allocated for others.
        is_batch_invariant: whether a row's bits must not depend on the adapters in the slots.
    """

    kernels: GroupedLora
    max_rank: int
    is_changeable: Callable[[str], bool]
    is_batch_invariant: bool = False


def grouped_adapters(args: EngineArgs, config: ModelConfig, kernels: Kernels) -> GroupedAdapters | None:
    """Return the configuration for a model's adapters, or None if its kernels compute one adapter after the other."""
    if kernels.lora is None:
        return None
    allowed = changeable(config, args.lora_target_modules)
    return GroupedAdapters(
        kernels.lora, args.max_lora_rank, lambda name: is_changeable(name, allowed), args.batch_invariant
    )


class StackShape(NamedTuple):
    """Sizes of an operation and of its parts that adapters may change.

    Attributes:
        heads: number of heads of the argument for absorbed matrices of latent attention; otherwise 1.
        inner: number of input columns; for the embedding, the size of the vocabulary.
        parts: index of the first output of each part, and its number of outputs.
    """

    form: SiteForm
    heads: int
    inner: int
    parts: tuple[tuple[int, int], ...]


class SlotStacks:
    """The matrices of one operation in all slots.

    Args:
        grouped: kernels and maximum rank.
        dtype, device: those of the matrices.
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
        # Slots are set inside and outside inference mode, and torch does not permit changes of inference tensors
        # outside it.
        with torch.inference_mode(False):
            # Zeros, so that no NaN is copied: the embedding's lookup also copies elements beyond an adapter's rank.
            self._a = torch.zeros((num_slots, *a_size), dtype=dtype, device=device)
            self._b = torch.zeros((num_slots, heads_b, outputs, max_rank), dtype=dtype, device=device)
            self._ranks = torch.zeros((num_slots, parts), dtype=torch.int32, device=device)
            self._output_tiles = to_device(tiles, device, torch.int32).view(-1, 4)

    def set(self, slot: int, parts: Sequence[LoraPart]) -> None:
        """Set the parts of a slot from the next step on. Copies may still be in progress when it returns."""
        self._ranks[slot].zero_()
        index_of = {first: index for index, (first, _) in enumerate(self._shape.parts)}
        for a, b, first in parts:
            index, rank = index_of[first], b.shape[-1]
            for to, matrix in zip(self._views(slot, index, rank), self._factors(a, b), strict=True):
                assert to.shape == matrix.shape
                to.copy_(matrix, non_blocking=True)
            self._ranks[slot, index].fill_(rank)

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: BatchRows, space: RowSpace) -> None:
        """Add the result of each row's adapter for x to y, the operation's result."""
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
        """Return views of A and B of one part of a slot."""
        first, size = self._first_rows[part], self._shape.parts[part][1]
        a = self._a[slot, :, :rank] if self._shape.form is SiteForm.EMBEDDING else self._a[slot, part, :, :rank]
        return a, self._b[slot, :, first : first + size, :rank]

    def _factors(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an adapter's factors in the order and shapes of `_views`; for absorbed keys, B precedes A."""
        if self._shape.form is SiteForm.EMBEDDING:
            return a, b.unsqueeze(0)
        if self._shape.form is SiteForm.ABSORBED_KEYS:  # queries are multiplied by B of their heads, then by A
            return b.transpose(1, 2), a.T.unsqueeze(0)
        return a.unsqueeze(0), (b if self._shape.form is SiteForm.ABSORBED_VALUES else b.unsqueeze(0))
