"""All operations that a model is computed with, for one kind of device.

What a layer does not change from step to step (weights, their addresses, an activation's name) is given once, and what
comes back is called in every step: at one token a step, looking things up takes longer than small operations
themselves. Weights must stay where they are; their values may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.stored_formats import StoredFormat

#: One tensor from another: a linear operation, a norm, an activation.
Operation = Callable[[torch.Tensor], torch.Tensor]

#: (x [tokens, hidden], weights [tokens, k] float32, expert numbers [tokens, k] int64) → [tokens, hidden]. Numbers
#: beyond those of the experts that it was made of add nothing.
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: (x, what is added to it), both [tokens, hidden] → their sum and its norm.
SumAndNorm = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: Router logits [tokens, experts] → weights [tokens, k] float32 and expert numbers [tokens, k] int64.
Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: See `Kernels.argmax`.
Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: See `Kernels.logprobs`.
Logprobs = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: See `Kernels.keep_allowed`.
KeepAllowed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

#: See `Kernels.select_token`.
SelectToken = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MakeLinear(Protocol):
    """See `Kernels.linear`."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
        """The linear operation with this weight and bias."""
        ...


class MakeExperts(Protocol):
    """See `Kernels.experts`."""

    def __call__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        act: Activation,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Experts:
        """The experts with these weights and biases."""
        ...


class MakeQuantLinear(Protocol):
    """See `Kernels.quant_linear`."""

    def __call__(
        self,
        blocks: torch.Tensor,
        stored: StoredFormat,
        inner: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> Operation:
        """The linear operation with this weight and bias, of activations of `dtype`."""
        ...


@dataclass(frozen=True)
class BlockStack:
    """Several matrices of the same shape, stored in blocks.

    Attributes:
        blocks: uint8 [count, outputs, bytes of a row].
        stored: their format.
        inner: elements in a row.
        biases: [count, outputs], or None.
    """

    blocks: torch.Tensor
    stored: StoredFormat
    inner: int
    biases: torch.Tensor | None = None


#: See `Kernels.block_experts`.
MakeBlockExperts = Callable[[BlockStack, BlockStack, Activation, torch.dtype], Experts]


@dataclass(frozen=True)
class Panels:
    """Operations on matrices [outputs, inner] whose rows were brought into panels (`kernels.panels`).

    Attributes:
        fit: whether a matrix can be packed, and is multiplied faster then.
        pack: packs a matrix, in place.
        linear: as `Kernels.linear`, of a packed matrix.
        rows: a packed matrix, and numbers of rows [count] int64 → [count, inner].
    """

    fit: Callable[[torch.Tensor], bool]
    pack: Callable[[torch.Tensor], None]
    linear: MakeLinear
    rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BlockPanels:
    """The same on matrices in blocks [outputs, bytes of a row].

    Attributes:
        fit: whether a matrix in this format, of rows of so many elements, can be packed, and is multiplied faster by
            activations of this dtype then.
        pack: packs such a matrix, in place.
        linear: as `Kernels.quant_linear`, of a packed matrix, and by x in 8 bits (`int8_activations`).
        rows: as `Kernels.block_rows`, of a packed matrix.
    """

    fit: Callable[[torch.Tensor, StoredFormat, int, torch.dtype], bool]
    pack: Callable[[torch.Tensor, StoredFormat, int], None]
    linear: MakeQuantLinear
    rows: Callable[[torch.Tensor, StoredFormat, int, torch.Tensor, torch.dtype], torch.Tensor]


class AdapterTiles(NamedTuple):
    """Rows in tiles that each belong to one adapter; see `GroupedLora.group`.

    Attributes:
        rows: int32 [tiles × rows of a tile]; as many as there are rows: none.
        slots: int32 [tiles], of their adapters; -1: the tile is not used.
    """

    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class GroupedLora:
    """What adapters (LoRA) add to an operation, of all rows at once; `kernels/lora.py` defines it. The matrices of an
    operation lie by slot, each with room for the largest rank; what lies beyond an adapter's rank is not read. Nothing
    waits for the device, and shapes do not depend on which adapters rows have.

    Attributes:
        group: (int64 [rows], the slot of each, below 0 for none; the number of slots; the matrices' dtype) → tiles.
        shrink: (x [rows, heads, inner]; A [slots, parts, heads or 1, max rank, inner] of the same dtype; int32 [slots,
            parts] ranks, 0 where an adapter does not change a part; tiles: their rows, and their slots) → x Aᵀ float32
            [rows, heads, sums, parts, max rank]: as many sums as there are, added up, are the result.
        expand: (y [rows, heads, outputs], changed in place; what `shrink` gives; B [slots, heads or 1, rows, max rank];
            ranks; int32 [count, 4] tiles of outputs: the first, the end, the part, and how many of B's rows the first
            one's is behind its own number; tiles, as above).
        output_tile: outputs of a tile at most, for matrices of a dtype.
    """

    group: Callable[[torch.Tensor, int, torch.dtype], AdapterTiles]
    shrink: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    expand: Callable[..., None]
    output_tile: Callable[[torch.dtype], int]


@dataclass(frozen=True)
class Kernels:
    """The operations. Each is defined by a file of this folder.

    Attributes:
        linear: weight [outputs, inner] and bias [outputs] or None → `linear.linear` with them.
        batched_linear: weight [heads, outputs, inner] → `batched_linear.batched_linear` with it.
        concat_linear: `concat_linear.concat_linear`.
        experts: gate_up [experts, 2 × size, hidden], down [experts, hidden, size], the activation, and biases
            [experts, 2 × size] and [experts, hidden] or None → `moe.experts` with them.
        float32_linear: as `linear`, `moe.float32_linear` of it.
        route: how experts are chosen, and a correction bias [experts] float32 or None → `moe.route` with them.
        quant_linear: weight in blocks [outputs, bytes of a row], their format, elements in a row, activations' dtype,
            and bias [outputs] or None → `blocks.block_linear` with them.
        block_experts: gate_up and down projections in blocks, shaped as those of `experts`, the activation and
            activations' dtype → `moe.experts` with them.
        block_rows: `blocks.block_rows`.
        rms_norm: weight [d], eps → `rms_norm.rms_norm` with them.
        add_rms_norm: weight [d], eps → `rms_norm.after_sum` of that norm.
        layer_norm: weight and bias, eps → `layer_norm.layer_norm` with them.
        activation: what a config states → that activation; raises ModelError where it is not known.
        act_and_mul: the same, of a gate → act(gate) × up of [tokens, 2 × size] with the gates first.
        apply_rotary: `rotary.apply_rotary`.
        concat_rotated: `rotary.concat_rotated`.
        cos_sin: `rotary.cos_sin`.
        argmax: `argmax.argmax`.
        narrow_logits: whether `argmax` takes bfloat16, too: then logits are made float32 only where more is asked for.
        keep_allowed: `token_mask.keep_allowed`.
        select_token: `select_token.select_token`.
        logprobs: `logprobs.logprobs`.
        panels: for weights that are packed once they are loaded; None: rows are multiplied as they are.
        block_panels: as `panels`, for weights in blocks.
        lora: what adapters add, of all rows at once; None: it is computed an adapter at a time.
    """

    linear: MakeLinear
    batched_linear: Callable[[torch.Tensor], Operation]
    concat_linear: Callable[[Sequence[Operation]], Operation]
    experts: MakeExperts
    float32_linear: MakeLinear
    route: Callable[[MoEConfig, torch.Tensor | None], Route]
    quant_linear: MakeQuantLinear
    block_experts: MakeBlockExperts
    block_rows: Callable[[torch.Tensor, StoredFormat, int, torch.Tensor, torch.dtype], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, float], Operation]
    add_rms_norm: Callable[[torch.Tensor, float], SumAndNorm]
    layer_norm: Callable[[torch.Tensor | None, torch.Tensor | None, float], Operation]
    activation: Callable[[Activation], Operation]
    act_and_mul: Callable[[Activation], Operation]
    apply_rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
    concat_rotated: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
    cos_sin: Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    argmax: Argmax
    keep_allowed: KeepAllowed
    select_token: SelectToken
    logprobs: Logprobs
    narrow_logits: bool = False
    panels: Panels | None = None
    block_panels: BlockPanels | None = None
    lora: GroupedLora | None = None
