"""A scheduled batch → the flat tensors that the model runs on.

Built with numpy: at these sizes it is several times cheaper a call than torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stoker_engine.attention.backend import KVCache
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.core.batch import ScheduledBatch, ScheduledSequence
from stoker_engine.models.model import StepInputs
from stoker_engine.sizing.cache_groups import NULL_BLOCK


@dataclass(frozen=True)
class Inputs:
    """A step's inputs.

    Attributes:
        first_rows: the flat row of each sequence's first token in this step, by the sequence's id.
        last_rows: of its last one.
    """

    step: StepInputs
    first_rows: dict[str, int]
    last_rows: dict[str, int]


@dataclass(frozen=True)
class InputBuilder:
    """Builds a step's inputs.

    Attributes:
        num_groups: groups of layers that share block tables.
    """

    block_size: int
    num_groups: int
    device: torch.device

    def build(self, batch: ScheduledBatch, caches: list[KVCache]) -> Inputs:
        """The inputs of one step; decodes first, then chunks, each in the batch's order."""
        sequences = [s for s in batch.sequences if len(s.token_ids) == 1]
        num_decodes = len(sequences)
        sequences += [s for s in batch.sequences if len(s.token_ids) > 1]

        lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int32)
        starts = np.zeros(len(sequences) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        ends = np.array([s.end for s in sequences], dtype=np.int32)
        token_ids = np.fromiter((t for s in sequences for t in s.token_ids), dtype=np.int64, count=int(starts[-1]))
        row = np.arange(len(token_ids))
        of_sequence = np.repeat(np.arange(len(sequences)), lengths)
        positions = row - starts[of_sequence] + (ends - lengths)[of_sequence]

        metadata = AttentionMetadata(
            query_starts=self._tensor(starts),
            seq_lens=self._tensor(ends),
            num_decodes=num_decodes,
            block_size=self.block_size,
            groups=[self._tables(sequences, group, of_sequence, positions) for group in range(self.num_groups)],
        )
        step = StepInputs(self._tensor(token_ids), self._tensor(positions), metadata, caches)
        ids = [s.id for s in sequences]
        return Inputs(
            step,
            first_rows=dict(zip(ids, starts[:-1].tolist(), strict=True)),
            last_rows=dict(zip(ids, (starts[1:] - 1).tolist(), strict=True)),
        )

    def _tables(
        self, sequences: list[ScheduledSequence], group: int, of_sequence: np.ndarray, positions: np.ndarray
    ) -> BlockTables:
        width = max(len(s.blocks[group]) for s in sequences)
        tables = np.full((len(sequences), width), NULL_BLOCK, dtype=np.int32)
        for row, sequence in enumerate(sequences):
            tables[row, : len(sequence.blocks[group])] = sequence.blocks[group]
        slot_mapping = tables[of_sequence, positions // self.block_size].astype(np.int64) * self.block_size
        return BlockTables(self._tensor(tables), self._tensor(slot_mapping + positions % self.block_size))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
