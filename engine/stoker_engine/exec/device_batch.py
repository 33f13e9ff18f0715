"""Per-row values of the input batch on the device, and the gather of a step's inputs from them.

    for each row of the batch, persistent     last token │ tokens computed │ adapter │ position delta
                                                  ▲ a step's changes, and its sampled tokens
    for each token of a step                  its row ──► token id, position, adapter, …

Sampled tokens are written here on the device. A step may therefore be started before the host knows the tokens that the
previous one samples; in their place it sends `UNKNOWN`.

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

#: In place of a token that the host does not know yet.
UNKNOWN: Final = -1


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
            rows: int64 [count], distinct rows.
            values: int64 [values, count]. Where the last token is `UNKNOWN`, the row keeps its own.
        """
        values[LAST_TOKEN] = torch.where(values[LAST_TOKEN] < 0, self._last_tokens[rows], values[LAST_TOKEN])
        self._values.index_copy_(1, rows, values)

    def sampled(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the sampled tokens of some rows.

        Args:
            rows: int64 [count]. If a row occurs several times, which of its tokens is written is arbitrary.
            tokens: int64 [count]; negative if none was sampled.
        """
        self._last_tokens.index_copy_(0, rows, tokens.clamp_min(0))  # a step in flight may look the token up

    def gather(
        self, rows: torch.Tensor, token_ids: torch.Tensor | None = None, offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids of a step and their positions, int64 [tokens].

        Args:
            rows: int64 [tokens], each token's row, or `layers.batch_rows.PADDING`.
            token_ids: int64 [tokens], `UNKNOWN` for the last token of the row; None: the last tokens of all rows.
            offsets: int64 [tokens], position of each token relative to its row's first uncomputed token; None: 0.
        """
        positions = self._num_computed[rows] + self._position_deltas[rows]
        last_tokens = self._last_tokens[rows]
        token_ids = last_tokens if token_ids is None else torch.where(token_ids < 0, last_tokens, token_ids)
        return token_ids, positions if offsets is None else positions + offsets
