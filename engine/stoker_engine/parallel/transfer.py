"""The two places where a step's numbers cross between host and device.

Beside them, sampling waits for the device where it branches on what it found (`sampling.draw`, `sampling.logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(
    numbers: np.ndarray | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Numbers of the host as a tensor; on the CPU an array's own memory. The host does not wait for the copy."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else torch.tensor(numbers, dtype=dtype)
    if dtype is not None:
        tensor = tensor.to(dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> Any:
    """A tensor's numbers as lists; waits until the device has computed them."""
    return tensor.tolist()
