"""A scheduled batch → the flat tensors that the model runs on.

Built with numpy: at these sizes it is several times cheaper a call than torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stoker_engine.attention.backend import KVCache
from stoker_engine.attention.metadata import AttentionMetadata, ChunkView, DecodeView
from stoker_engine.core.batch import ScheduledBatch, ScheduledSequence
from stoker_engine.models.decoder import StepInputs


@dataclass(frozen=True)
class InputBuilder:
    """Builds a step's inputs.

    Attributes:
        windows: the distinct sliding windows of the model's layers; None stands for no window.
    """

    block_size: int
    windows: frozenset[int | None]
    device: torch.device

    def build(self, batch: ScheduledBatch, caches: list[KVCache]) -> StepInputs:
        """The inputs of one step; decodes first, then chunks, each in the batch's order."""
        decodes = [sequence for sequence in batch.sequences if len(sequence.token_ids) == 1]
        chunks = [sequence for sequence in batch.sequences if len(sequence.token_ids) > 1]
        sequences = decodes + chunks

        token_ids = np.concatenate([np.asarray(sequence.token_ids, dtype=np.int64) for sequence in sequences])
        positions = np.concatenate([np.arange(sequence.start, sequence.end) for sequence in sequences])
        slots = np.concatenate([self._slots(sequence) for sequence in sequences])
        lengths = np.array([len(sequence.token_ids) for sequence in sequences])
        ends = np.cumsum(lengths)
        last_row = {sequence.request_id: int(end) - 1 for sequence, end in zip(sequences, ends, strict=True)}
        sample_rows = np.array([last_row[sequence.request_id] for sequence in batch.sampling], dtype=np.int64)

        chunk_rows = [
            slice(int(end) - len(c.token_ids), int(end)) for c, end in zip(chunks, ends[len(decodes) :], strict=True)
        ]
        metadata = AttentionMetadata(
            slots=self._tensor(slots),
            num_decodes=len(decodes),
            decodes={window: self._decode_view(decodes, window) for window in self.windows} if decodes else {},
            chunks={
                window: [self._chunk_view(c, rows, window) for c, rows in zip(chunks, chunk_rows, strict=True)]
                for window in self.windows
            },
        )
        return StepInputs(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            sample_rows=self._tensor(sample_rows),
            attention=metadata,
            caches=caches,
        )

    def _slots(self, sequence: ScheduledSequence) -> np.ndarray:
        positions = np.arange(sequence.start, sequence.end)
        first = sequence.start // self.block_size
        blocks = np.asarray(sequence.blocks[first : -(-sequence.end // self.block_size)], dtype=np.int64)
        return blocks[positions // self.block_size - first] * self.block_size + positions % self.block_size

    def _decode_view(self, sequences: list[ScheduledSequence], window: int | None) -> DecodeView:
        size = self.block_size
        ends = np.array([sequence.end for sequence in sequences])
        # The oldest visible position, and the block it lies in; blocks before are not even gathered.
        oldest = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        first = oldest // size
        counts = -(-ends // size) - first
        blocks = np.zeros((len(sequences), counts.max()), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            blocks[row, : counts[row]] = sequence.blocks[first[row] : first[row] + counts[row]]
        positions = first[:, None] * size + np.arange(blocks.shape[1] * size)
        mask = (positions < ends[:, None]) & (positions >= oldest[:, None])
        return DecodeView(self._tensor(blocks), self._tensor(mask[:, None, None, :]))

    def _chunk_view(self, sequence: ScheduledSequence, rows: slice, window: int | None) -> ChunkView:
        size = self.block_size
        first = 0 if window is None else max(sequence.start + 1 - window, 0) // size
        blocks = np.asarray(sequence.blocks[first : -(-sequence.end // size)], dtype=np.int64)
        queries = np.arange(sequence.start, sequence.end)[:, None]
        keys = first * size + np.arange(len(blocks) * size)[None, :]
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        return ChunkView(rows, self._tensor(blocks), self._tensor(mask[None, None]))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
