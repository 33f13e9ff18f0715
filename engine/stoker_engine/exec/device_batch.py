"""Per-row values of the input batch on the device, and the gather of a step's inputs from them.

    for each row of the batch, persistent     last token │ tokens computed │ adapter │ position delta
                                                  ▲ a step's changes
    for each token of a step                  its row ──► token id, position, adapter, …

A CUDA graph gets the rows of a step's tokens and gathers their values, so it is valid for any sequences in these rows.
The last entry is for padding: a token in row -1 (`layers.batch_rows.PADDING`) reads token 0 at position 0, without an
adapter. On a CPU the per-row values are the input batch's own arrays.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

#: Indices of the values in the first dimension of [values, rows].
LAST_TOKEN, NUM_COMPUTED, ADAPTER, POSITION_DELTA = range(4)
NUM_VALUES: Final = 4


def empty_values(num_rows: int) -> np.ndarray:
    """Return int64 [values, rows + 1]: the values of unused rows, and of the padding entry."""
    values = np.zeros((NUM_VALUES, num_rows + 1), dtype=np.int64)
    values[ADAPTER] = -1
    return values


class DeviceBatch:
    """The per-row values on the device.

    Args:
        values: values of the input batch, see `empty_values`; shared on a CPU.

    Attributes:
        adapters: int64 [rows + 1], see `BatchRows.adapters`.
    """

    def __init__(self, values: np.ndarray, device: torch.device) -> None:
        self._values = torch.from_numpy(values).to(device)
        self._last_tokens, self._num_computed, self.adapters, self._position_deltas = self._values

    def update(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Update the values of some rows.

        Args:
            rows: int64 [count].
            values: int64 [values, count].
        """
        self._values.index_copy_(1, rows, values)

    def gather(
        self, rows: torch.Tensor, token_ids: torch.Tensor | None = None, offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids of a step and their positions, int64 [tokens].

        Args:
            rows: int64 [tokens], each token's row, or `layers.batch_rows.PADDING`.
            token_ids: int64 [tokens], if known on the host; None: each row's last token.
            offsets: int64 [tokens], position of each token relative to its row's first uncomputed token; None: 0.
        """
        positions = self._num_computed[rows] + self._position_deltas[rows]
        if token_ids is None:
            token_ids = self._last_tokens[rows]
        return token_ids, positions if offsets is None else positions + offsets
