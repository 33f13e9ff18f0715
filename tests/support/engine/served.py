"""What a test asks of a backend when only the dtype matters."""

from __future__ import annotations

import torch

from stoker_engine.attention.external import Served, said


def served(dtype: torch.dtype) -> Served:
    return Served((), dtype, said(dtype), 16)
