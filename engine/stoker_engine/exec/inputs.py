"""A step and the rows → the flat tensors that the model runs on.

Built with numpy: at these sizes it is several times cheaper a call than torch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.core.step import Step
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.parallel.transfer import all_to_device
from stoker_engine.sizing.cache_groups import CacheGroup


@dataclass(frozen=True)
class Inputs:
    """A step's inputs.

    Attributes:
        token_ids, positions: [tokens] int64.
        logit_rows: int64, flat rows whose logits are wanted, ascending: of each sequence that samples its last known
            token, and its draft.
        ends: [sequences] the flat row after each sequence's last one.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    metadata: AttentionMetadata
    ends: np.ndarray


@dataclass(frozen=True)
class InputBuilder:
    """Builds a step's inputs.

    Attributes:
        groups: of layers; each has its block tables.
    """

    block_size: int
    groups: Sequence[CacheGroup]
    device: torch.device

    def build(self, step: Step, rows: InputBatch, size: int | None = None) -> Inputs:
        """The inputs of one step, in the batch's order: decodes first, then chunks.

        Args:
            size: of a step of decodes alone: there are inputs of so many sequences. Those behind the step's own have
                no tokens, neither before nor by this step.
        """
        row = np.array(step.rows, dtype=np.int32)
        starts = np.array(step.starts, dtype=np.int32)
        count = len(row)
        of_sequence = np.arange(count)
        if step.num_decodes == count:  # as a rule; the model pushed these operations out of the caches, so few are best
            ends, positions, logit_rows = starts + 1, starts.astype(np.int64), of_sequence
            query_starts = np.arange(count + 1, dtype=np.int32)
            token_ids = rows.token_ids[row, positions].astype(np.int64)
            if min(step.num_samples) == 0:
                logit_rows = _logit_rows(step, query_starts[1:])
        else:
            lengths = np.array(step.lengths, dtype=np.int32)
            ends = starts + lengths
            query_starts = np.zeros(count + 1, dtype=np.int32)
            np.cumsum(lengths, out=query_starts[1:])
            of_sequence = np.repeat(of_sequence, lengths)
            positions = np.arange(len(of_sequence)) - query_starts[of_sequence] + starts[of_sequence]
            token_ids = rows.token_ids[row[of_sequence], positions].astype(np.int64)
            logit_rows = _logit_rows(step, query_starts[1:])
        longest = -(-max(map(operator.add, step.starts, step.lengths)) // self.block_size)
        index, offset = np.divmod(positions, self.block_size)
        all_tables, mappings = [], []
        for group_index, group in enumerate(self.groups):
            width = group.blocks_per_sequence if group.kind == "state" else longest
            tables = rows.tables[group_index, row, :width]
            all_tables.append(tables)
            slot_mapping = np.empty(0, dtype=np.int64)
            if group.kind == "tokens":
                slot_mapping = tables[of_sequence, index].astype(np.int64) * self.block_size + offset
            mappings.append(slot_mapping)
        if size is not None and size > count:
            token_ids, positions, ends = (_padded(array, size) for array in (token_ids, positions, ends))
            query_starts = np.arange(size + 1, dtype=np.int32)
            all_tables = [_padded(tables, size) for tables in all_tables]
            mappings = [_padded(mapping, size, -1) for mapping in mappings]
        token_ids_, positions_, logit_rows_, query_starts_, ends_, *of_groups = all_to_device(
            [token_ids, positions, logit_rows, query_starts, ends, *all_tables, *mappings], self.device
        )
        groups = [
            BlockTables(tables, slot_mapping, group.sliding_window, group.kind)
            for tables, slot_mapping, group in zip(
                of_groups[: len(all_tables)], of_groups[len(all_tables) :], self.groups, strict=True
            )
        ]
        metadata = AttentionMetadata(
            query_starts=query_starts_,
            seq_lens=ends_,
            num_decodes=step.num_decodes,
            block_size=self.block_size,
            groups=groups,
            query_starts_host=query_starts,
            seq_lens_host=ends,
        )
        return Inputs(token_ids_, positions_, logit_rows_, metadata, query_starts[1:])


def _padded(array: np.ndarray, size: int, fill_value: int = 0) -> np.ndarray:
    """With rows of `fill_value` behind its own; `np.pad` takes several times as long."""
    padded = np.full((size, *array.shape[1:]), fill_value, dtype=array.dtype)
    padded[: len(array)] = array
    return padded


def _logit_rows(step: Step, ends: np.ndarray) -> np.ndarray:
    """See `Inputs`."""
    samples = np.array(step.num_samples, dtype=np.int32) > 0
    lasts: np.ndarray = ends[samples].astype(np.int64) - 1
    if not step.drafts:
        return lasts
    counts = np.ones(len(step.rows), dtype=np.int64)
    for draft in step.drafts:
        counts[draft.batch_index] += len(draft.token_ids)
    counts = counts[samples]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows: np.ndarray = np.repeat(lasts - counts + 1, counts) + within
    return rows
