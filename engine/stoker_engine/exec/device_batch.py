"""What the device keeps of each row of the input batch, and what a step gathers from there.

    for each row of the batch, persistent     last token │ tokens computed │ adapter │ position delta
                                                  ▲ a step's changes
    for each token of a step                  its row ──► token id, position, adapter, …

So a step sends the rows of its tokens, and a CUDA graph reads the rest itself: what was captured once is right for any
sequences in its rows. The last entry is padding's: a token in row -1
(`layers.batch_rows.PADDING`) reads token 0 at position 0, and no adapter.
On a CPU these are the input batch's own arrays.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

#: The values of a row, by their index.
LAST_TOKEN, NUM_COMPUTED, ADAPTER, POSITION_DELTA = range(4)
NUM_VALUES: Final = 4


def empty_values(num_rows: int) -> np.ndarray:
    """int64 [values, rows + 1]: no row is in use, and the last is padding's."""
    values = np.zeros((NUM_VALUES, num_rows + 1), dtype=np.int64)
    values[ADAPTER] = -1
    return values


class DeviceBatch:
    """The rows on the device.

    Args:
        values: the input batch's, see `empty_values`; on a CPU they are shared.

    Attributes:
        adapters: int64 [rows + 1], see `BatchRows.adapters`.
    """

    def __init__(self, values: np.ndarray, device: torch.device) -> None:
        self._values = torch.from_numpy(values).to(device)
        self._last_tokens, self._num_computed, self.adapters, self._position_deltas = self._values

    def update(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Takes in changes.

        Args:
            rows: int64 [count].
            values: int64 [values, count].
        """
        self._values.index_copy_(1, rows, values)

    def gather(
        self, rows: torch.Tensor, token_ids: torch.Tensor | None = None, offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token ids of a step and their positions, int64 [tokens].

        Args:
            rows: int64 [tokens], the row of each, or `layers.batch_rows.PADDING`.
            token_ids: int64 [tokens], where the host knows them; None: each is its row's last token.
            offsets: int64 [tokens], how far each is behind its row's first token that is not computed; None: 0.
        """
        positions = self._num_computed[rows] + self._position_deltas[rows]
        if token_ids is None:
            token_ids = self._last_tokens[rows]
        return token_ids, positions if offsets is None else positions + offsets
