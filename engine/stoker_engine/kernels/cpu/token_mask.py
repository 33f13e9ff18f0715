"""Binding of token_mask.cpp."""

from __future__ import annotations

import ctypes

import torch

from stoker_engine.kernels import token_mask


def keep_allowed(library: ctypes.CDLL, logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """See `kernels.token_mask.keep_allowed`."""
    if logits.stride(1) != 1:
        token_mask.keep_allowed(logits, rows, allowed)
        return
    allowed = allowed.contiguous()
    library.stoker_keep_allowed(
        logits.data_ptr(), logits.stride(0), logits.shape[1], rows.data_ptr(), allowed.data_ptr(), *allowed.shape
    )
