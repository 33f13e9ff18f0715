"""Requirements on an attention backend for tests in which only the dtype matters."""

from __future__ import annotations

import torch

from stoker_engine.attention.external import AttentionRequirements, dtype_name


def served(dtype: torch.dtype) -> AttentionRequirements:
    return AttentionRequirements((), dtype, dtype_name(dtype), 16)
