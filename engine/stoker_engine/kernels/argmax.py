"""The likeliest token of each row."""

from __future__ import annotations

import torch

from stoker_engine.kernels.native.argmax import argmax as native_argmax
from stoker_engine.kernels.native.library import native_library


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, vocabulary] float32 → [rows] int64: where each row is largest (the first, if equal), and [rows] float32:
    its largest number. Of a row that holds nan the largest is nan, and its place means nothing."""
    library = native_library(logits.device, logits.dtype)
    if library is None or logits.stride(1) != 1:
        return logits.argmax(dim=-1), logits.amax(dim=-1)
    return native_argmax(library, logits)
