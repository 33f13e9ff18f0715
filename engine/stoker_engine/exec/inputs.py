"""Builds the flat input tensors of the model from a step and the persistent batch (`InputBatch`).

Uses NumPy, whose calls are several times cheaper than torch's at these sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.core.step import Step
from stoker_engine.exec.device_batch import LAST_TOKEN, NUM_COMPUTED, POSITION_DELTA, UNKNOWN, DeviceBatch
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.layers.batch_rows import PADDING
from stoker_engine.parallel.transfer import all_to_device
from stoker_engine.sizing.cache_groups import CacheGroup
from stoker_engine.sizing.step_shapes import StepShape


@dataclass(frozen=True)
class Inputs:
    """A step's inputs.

    Attributes:
        token_rows: [tokens] int64, the row of each token; with padding, `PADDING` after the step's tokens.
        token_ids, positions: [tokens] int64; empty if a graph gathers them.
        ungathered: token ids and offsets from which a graph gathers (`DeviceBatch.gather`); empty without a graph, and
            for decodes.
        logit_rows: int64, ascending indices of the tokens whose logits are needed: the last known token and the draft
            of each sequence that samples.
        ends: [sequences], index in the step after each sequence's last token.
    """

    token_rows: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    metadata: AttentionMetadata
    ends: np.ndarray
    ungathered: list[torch.Tensor]


@dataclass(frozen=True)
class InputBuilder:
    """Builds a step's inputs.

    Attributes:
        batch: the rows on the host; `device_batch` holds their values on the device.
        groups: groups of layers, each with its own block tables.
        gathers: whether token ids and positions are gathered on the device. On a CPU the host provides them.
    """

    block_size: int
    groups: Sequence[CacheGroup]
    device: torch.device
    batch: InputBatch
    device_batch: DeviceBatch
    gathers: bool

    def build(self, step: Step, shape: StepShape | None = None) -> Inputs:
        """Build the inputs of one step, in its order: decodes first, then chunks.

        Args:
            shape: shape of a graph to which the step is padded (see `exec.graph_inputs`); None: no graph runs the step.
        """
        batch = self.batch
        row = np.array(step.rows, dtype=np.int64)
        starts = np.array(step.starts, dtype=np.int32)
        count = len(row)
        of_sequence = np.arange(count)
        offsets: np.ndarray | None = None
        if step.num_decodes == count:  # the common case; few operations, because the model has evicted the CPU caches
            ends, positions, logit_rows, token_rows = starts + 1, starts.astype(np.int64), of_sequence, row
            query_starts = np.arange(count + 1, dtype=np.int32)
            token_ids = batch.token_ids[row, positions].astype(np.int64)
            if min(step.num_samples) == 0:
                logit_rows = _logit_rows(step, query_starts[1:])
        else:
            lengths = np.array(step.lengths, dtype=np.int32)
            ends = starts + lengths
            query_starts = np.zeros(count + 1, dtype=np.int32)
            np.cumsum(lengths, out=query_starts[1:])
            of_sequence = np.repeat(of_sequence, lengths)
            token_rows = row[of_sequence]
            offsets = np.arange(len(of_sequence)) - query_starts[of_sequence]
            positions = offsets + starts[of_sequence]
            token_ids = batch.token_ids[token_rows, positions].astype(np.int64)
            logit_rows = _logit_rows(step, query_starts[1:])
        longest = -(-max(map(operator.add, step.starts, step.lengths)) // self.block_size)
        index, offset = np.divmod(positions, self.block_size)
        all_tables, mappings = list[np.ndarray](), list[np.ndarray]()
        for group_index, group in enumerate(self.groups):
            width = group.blocks_per_sequence if group.kind == "state" else longest
            tables = batch.tables[group_index, row, :width]
            all_tables.append(tables)
            slot_mapping = np.empty(0, dtype=np.int64)
            if group.kind == "tokens":
                slot_mapping = tables[of_sequence, index].astype(np.int64) * self.block_size + offset
            mappings.append(slot_mapping)
        if self.gathers:
            token_ids[query_starts[:-1][batch.num_in_flight[row] > 0]] = UNKNOWN
        tokens = self._token_arrays(row, starts, token_rows, token_ids, positions, offsets, query_starts)
        sequence_ends = query_starts[1:]
        if shape is not None:
            slots = num_slots(shape)
            token_rows, ends = _padded(token_rows, shape.tokens, PADDING), _padded(ends, slots)
            mappings = [_padded(mapping, shape.tokens, -1) for mapping in mappings]
            query_starts = _padded_query_starts(query_starts, shape)
            if shape.has_chunks:
                tokens = [*tokens[:2], *(_padded(values, shape.tokens) for values in tokens[2:])]
                tokens.append(np.array([step.num_decodes], dtype=np.int32))
        arrays: list[np.ndarray] = [token_rows, logit_rows, query_starts, ends, *all_tables, *mappings, *tokens]
        token_rows_, logit_rows_, query_starts_, ends_, *others = all_to_device(arrays, self.device)
        of_groups, of_tokens = others[: 2 * len(self.groups)], others[2 * len(self.groups) :]
        graph_decodes = of_tokens.pop() if shape is not None and shape.has_chunks else None
        groups = [
            BlockTables(tables, slot_mapping, group.sliding_window, group.kind)
            for tables, slot_mapping, group in zip(
                of_groups[: len(self.groups)], of_groups[len(self.groups) :], self.groups, strict=True
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
            graph_decodes=graph_decodes,
        )
        token_ids_, positions_, ungathered = self._gathered(token_rows_, of_tokens, shape is not None)
        return Inputs(token_rows_, token_ids_, positions_, logit_rows_, metadata, sequence_ends, ungathered)

    def _token_arrays(
        self,
        row: np.ndarray,
        starts: np.ndarray,
        token_rows: np.ndarray,
        token_ids: np.ndarray,
        positions: np.ndarray,
        offsets: np.ndarray | None,
        query_starts: np.ndarray,
    ) -> list[np.ndarray]:
        """Return the arrays from which the device gathers token ids and positions; on a CPU, token ids and positions
        themselves."""
        values = self.batch.values
        if not self.gathers:
            return [token_ids, positions + values[POSITION_DELTA, token_rows]]
        changed = values[:, row]
        changed[LAST_TOKEN], changed[NUM_COMPUTED] = token_ids[query_starts[: len(row)]], starts
        return [row, changed] if offsets is None else [row, changed, token_ids, offsets]

    def _gathered(
        self, token_rows: torch.Tensor, arrays: list[torch.Tensor], in_graph: bool
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return token ids and positions from the arrays of `_token_arrays`, or what a graph gathers them from; see
        `Inputs`."""
        if not self.gathers:
            return arrays[0], arrays[1], []
        rows, values, *ungathered = arrays
        self.device_batch.update(rows, values)
        if in_graph:
            return token_rows[:0], token_rows[:0], ungathered
        return *self.device_batch.gather(token_rows, *ungathered), []


def num_slots(shape: StepShape) -> int:
    """Return the number of sequences to which a step is padded for a graph. With chunks, one more than the shape has:
    the last one has the padding's tokens."""
    return shape.sequences + shape.has_chunks


def _padded_query_starts(query_starts: np.ndarray, shape: StepShape) -> np.ndarray:
    """Return the first token of each of `num_slots` sequences, and the number of tokens: without chunks each padding
    token is a sequence, with chunks the last sequence has all of them."""
    if not shape.has_chunks:
        return np.arange(shape.tokens + 1, dtype=np.int32)
    padded = _padded(query_starts, num_slots(shape) + 1, query_starts[-1])
    padded[-1] = shape.tokens
    return padded


def _padded(array: np.ndarray, size: int, fill_value: int = 0) -> np.ndarray:
    """Pad an array to `size` rows of `fill_value`; several times faster than `np.pad`."""
    padded = np.full((size, *array.shape[1:]), fill_value, dtype=array.dtype)
    padded[: len(array)] = array
    return padded


def _logit_rows(step: Step, ends: np.ndarray) -> np.ndarray:
    """See `Inputs.logit_rows`."""
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
