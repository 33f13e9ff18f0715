"""All operations that a model is computed with, for one kind of device.

What a layer does not change from step to step (weights, their addresses, an activation's name) is given once, and what
comes back is called in every step: at one token a step, looking things up takes longer than small operations
themselves. Weights must stay where they are; their numbers may change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.architectures.stored_formats import StoredFormat

#: One tensor from another: a product, a norm, an activation.
Operation = Callable[[torch.Tensor], torch.Tensor]

#: (x [tokens, hidden], weights [tokens, k] float32, expert numbers [tokens, k] int64) → [tokens, hidden]. Numbers
#: beyond those of the experts that it was made of add nothing.
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: See `Kernels.argmax`.
Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: See `Kernels.keep_allowed`.
KeepAllowed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class MakeProduct(Protocol):
    """See `Kernels.product`."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
        """The product with this weight and bias."""
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


class MakeBlockProduct(Protocol):
    """See `Kernels.block_product`."""

    def __call__(
        self,
        blocks: torch.Tensor,
        stored: StoredFormat,
        inner: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> Operation:
        """The product with this weight and bias, of activations of `dtype`."""
        ...


@dataclass(frozen=True)
class Kernels:
    """The operations. Each is defined by a file of this folder.

    Attributes:
        product: weight [outputs, inner] and bias [outputs] or None → `linear.linear` with them.
        batched_product: weight [heads, outputs, inner] → `batched_linear.batched_linear` with it.
        experts: gate_up [experts, 2 × size, hidden], down [experts, hidden, size], the activation, and biases
            [experts, 2 × size] and [experts, hidden] or None → `moe.experts` with them.
        block_product: weight in blocks [outputs, bytes of a row], their format, numbers in a row, activations' dtype,
            and bias [outputs] or None → `blocks.block_linear` with them.
        block_rows: `blocks.block_rows`.
        rms_norm: weight [d], eps → `rms_norm.rms_norm` with them.
        layer_norm: weight and bias, eps → `layer_norm.layer_norm` with them.
        activation: what a config states → that activation; raises ModelError where it is not known.
        act_and_mul: likewise → act(gate) × up of [tokens, 2 × size] with the gates first.
        apply_rotary: `rotary.apply_rotary`.
        angles: `rotary.angles`.
        argmax: `argmax.argmax`.
        keep_allowed: `token_mask.keep_allowed`.
    """

    product: MakeProduct
    batched_product: Callable[[torch.Tensor], Operation]
    experts: MakeExperts
    block_product: MakeBlockProduct
    block_rows: Callable[[torch.Tensor, StoredFormat, int, torch.Tensor, torch.dtype], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, float], Operation]
    layer_norm: Callable[[torch.Tensor | None, torch.Tensor | None, float], Operation]
    activation: Callable[[Activation], Operation]
    act_and_mul: Callable[[Activation], Operation]
    apply_rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
    angles: Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    argmax: Argmax
    keep_allowed: KeepAllowed
