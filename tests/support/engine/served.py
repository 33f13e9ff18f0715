"""What a test asks of a backend when only the dtype matters."""

from __future__ import annotations

import torch

from stoker_engine.attention.external import AttentionRequirements, said


def served(dtype: torch.dtype) -> AttentionRequirements:
    return AttentionRequirements((), dtype, said(dtype), 16)
