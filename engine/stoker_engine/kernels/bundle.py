"""Interface of the operations of a model, for one kind of device.

Most entries are factories: they take constants (weights, an activation's name) once, and return an operation that is
called in each step. With one token in a step, looking up addresses would take longer than a small operation itself.
Weights must therefore keep their addresses; their values may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.stored_formats import StoredFormat

#: Operation with one input and one output tensor: linear, norm or activation.
Operation = Callable[[torch.Tensor], torch.Tensor]

#: (x [tokens, hidden], weights [tokens, k] float32, expert indices [tokens, k] int64) → [tokens, hidden]. Indices
#: beyond the experts of the operation are ignored.
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: (x, added), both [tokens, hidden] → their sum, and the norm of the sum.
SumAndNorm = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: Router logits [tokens, experts] → weights [tokens, k] float32 and expert indices [tokens, k] int64.
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
        """Return the linear operation with this weight and bias."""
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
        """Return the experts with these weights and biases."""
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
        """Return the linear operation with this weight and bias for activations of `dtype`."""
        ...


@dataclass(frozen=True)
class BlockStack:
    """Several matrices of the same shape, stored in blocks.

    Attributes:
        blocks: uint8 [count, outputs, bytes of a row].
        stored: format of the blocks.
        inner: elements in a row.
        biases: [count, outputs], or None.
        is_packed: whether `blocks` are packed (`BlockPanels`).
        row_format: format to which activations are quantized before they are multiplied; None: they are not quantized.
    """

    blocks: torch.Tensor
    stored: StoredFormat
    inner: int
    biases: torch.Tensor | None = None
    is_packed: bool = False
    row_format: RowFormat | None = None


#: See `Kernels.block_experts`.
MakeBlockExperts = Callable[[BlockStack, BlockStack, Activation, torch.dtype], Experts]


@dataclass(frozen=True)
class Panels:
    """Operations on matrices [outputs, inner] in panels (`kernels.panels`).

    Attributes:
        fit: whether a matrix can be packed, and is then multiplied faster.
        pack: packs a matrix, in place.
        linear: `Kernels.linear` of a packed matrix.
        rows: (packed matrix, row indices [count] int64) → [count, inner].
    """

    fit: Callable[[torch.Tensor], bool]
    pack: Callable[[torch.Tensor], None]
    linear: MakeLinear
    rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BlockPanels:
    """Operations on matrices in blocks [outputs, bytes of a row], packed after loading: on a CPU into panels
    (`kernels.panels`), on a GPU into tiles of words (`kernels.triton.quant.packed_layout`).

    Attributes:
        fit: (matrix, format, elements in a row, dtype of activations) → whether the matrix can be packed, and is then
            multiplied faster.
        pack: packs a matrix, in place.
        linear: `Kernels.quant_linear` of a matrix that is packed before the operation is called.
        rows: `Kernels.block_rows` of a packed matrix.
        fit_stack: `fit` of several matrices [count, outputs, bytes of a row], which `pack` packs, and
            `Kernels.block_experts` multiplies; None: they are not packed.
        rounds_activations: whether `linear` rounds x to integers of 8 bits (`int8_activations`).
    """

    fit: Callable[[torch.Tensor, StoredFormat, int, torch.dtype], bool]
    pack: Callable[[torch.Tensor, StoredFormat, int], None]
    linear: MakeQuantLinear
    rows: Callable[[torch.Tensor, StoredFormat, int, torch.Tensor, torch.dtype], torch.Tensor]
    fit_stack: Callable[[torch.Tensor, StoredFormat, int, torch.dtype], bool] | None = None
    rounds_activations: bool = False


class RowFormat(Enum):
    """How rows of activations are quantized: dtype of the values, and columns that share a scale (0: all)."""

    FP8_ROWS = torch.float8_e4m3fn, 0
    FP8_GROUPS = torch.float8_e4m3fn, 128
    INT8_ROWS = torch.int8, 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.value[0]

    @property
    def group(self) -> int:
        """Number of columns that share a scale; 0: all."""
        return self.value[1]

    def groups(self, inner: int) -> int:
        """Return the number of scales of a row of `inner` elements; the last group may be smaller."""
        return -(-inner // self.group) if self.group else 1


class QuantizedRows(NamedTuple):
    """Quantized rows of activations; see `w8a8_linear.quantize_rows`.

    Attributes:
        values: [rows, inner], float8_e4m3fn or int8.
        scales: float32 [rows, groups], by which the values are multiplied.
    """

    values: torch.Tensor
    scales: torch.Tensor


#: Input of a linear operation that may quantize its activations.
Activations = torch.Tensor | QuantizedRows


@dataclass(frozen=True)
class QuantizingKernels:
    """Operations whose results are quantized to one `RowFormat`: those of `Kernels` with the same names, followed by
    `quantize`, with the same bits.

    Attributes:
        quantize: x [..., inner] → its rows, `w8a8_linear.quantize_rows`.
        rms_norm: weight [d], eps → operation x [rows, d] → quantized rows.
        add_rms_norm: weight [d], eps → operation (x, added), both [rows, d] → their sum, and quantized rows.
        act_and_mul: the activation → operation x [rows, 2 × size] → quantized rows.
        activation: the activation → operation x [rows, size] → quantized rows.
    """

    quantize: Callable[[torch.Tensor], QuantizedRows]
    rms_norm: Callable[[torch.Tensor, float], Callable[[torch.Tensor], QuantizedRows]]
    add_rms_norm: Callable[
        [torch.Tensor, float], Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, QuantizedRows]]
    ]
    act_and_mul: Callable[[Activation], Callable[[torch.Tensor], QuantizedRows]]
    activation: Callable[[Activation], Callable[[torch.Tensor], QuantizedRows]]


class AdapterTiles(NamedTuple):
    """Rows grouped into tiles of a single adapter each; see `GroupedLora.group`.

    Attributes:
        rows: int32 [tiles × rows of a tile], row indices; the number of rows marks padding.
        slots: int32 [tiles], slot of the tile's adapter; -1 for unused tiles.
    """

    rows: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class GroupedLora:
    """LoRA of all rows at once; `kernels/lora.py` defines it. An operation's matrices are indexed by slot and padded to
    the largest rank; elements beyond an adapter's rank are not read. The host never waits for the device, and shapes do
    not depend on the rows' adapters.

    Attributes:
        group: (slot of each row, int64 [rows], negative for none; number of slots; dtype of the matrices) → the tiles.
        shrink: (x [rows, heads, inner]; A [slots, parts, heads or 1, max rank, inner] of the same dtype; ranks int32
            [slots, parts], 0 where an adapter does not change a part; rows and slots of the tiles) → partial sums of
            x Aᵀ, float32 [rows, heads, sums, parts, max rank], whose sum over `sums` is the result.
        expand: (y [rows, heads, outputs]; result of `shrink`; B [slots, heads or 1, rows, max rank];
            ranks; tiles of outputs int32 [count, 4]: first output, end, part, and the offset from an output's index
            to its row of B; rows and slots of the tiles): adds the adapters' results to y.
        output_tile: dtype of the matrices → largest number of outputs in a tile.
    """

    group: Callable[[torch.Tensor, int, torch.dtype], AdapterTiles]
    shrink: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    expand: Callable[..., None]
    output_tile: Callable[[torch.dtype], int]


@dataclass(frozen=True)
class Kernels:
    """The operations of a model. Each is defined by the reference implementation in a file of this folder.

    Attributes:
        linear: weight [outputs, inner] and bias [outputs] or None → `linear.linear` with them.
        batched_linear: weight [heads, outputs, inner] → `batched_linear.batched_linear` with that weight.
        concat_linear: `concat_linear.concat_linear`.
        experts: gate_up [experts, 2 × size, hidden], down [experts, hidden, size], the activation, and biases
            [experts, 2 × size] and [experts, hidden] or None → `moe.experts` with them.
        float32_linear: like `linear`, in float32 (`moe.float32_linear`).
        route: MoE config and correction bias [experts] float32 or None → `moe.route` with them.
        quant_linear: weight in blocks [outputs, bytes of a row], format, elements in a row, dtype of activations, and
            bias [outputs] or None → `blocks.block_linear` with them.
        block_experts: gate_up and down in blocks, with the shapes of `experts`, the activation, and the dtype of x →
            `moe.experts` with them.
        block_rows: `blocks.block_rows`.
        rms_norm: weight [d], eps → `rms_norm.rms_norm` with them.
        add_rms_norm: weight [d], eps → `rms_norm.after_sum` of that norm.
        layer_norm: weight and bias, eps → `layer_norm.layer_norm` with them.
        activation: `activation.activation`.
        act_and_mul: `activation.act_and_mul`.
        apply_rotary: `rotary.apply_rotary`.
        concat_rotated: `rotary.concat_rotated`.
        cos_sin: `rotary.cos_sin`.
        argmax: `argmax.argmax`.
        narrow_logits: whether `argmax` also accepts bfloat16, so that greedy sampling needs no float32 logits.
        keep_allowed: `token_mask.keep_allowed`.
        select_token: `select_token.select_token`.
        logprobs: `logprobs.logprobs`.
        panels: operations on weights that are packed after loading; None if the kernels do not use panels.
        block_panels: like `panels`, for weights in blocks.
        lora: LoRA of all rows at once; None if it is computed adapter by adapter.
        quantizing: operations with quantized results, for each format of activations with which matrices that
            `block_panels` packs are multiplied.
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
    quantizing: dict[RowFormat, QuantizingKernels] = field(default_factory=dict)
