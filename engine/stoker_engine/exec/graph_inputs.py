"""Fixed addresses of a step's inputs, which all CUDA graphs read.

    tokens       decodes, one each │ chunks of prompts, drafts │ padding
    sequences    decodes │ chunks │ unused, without tokens │ one that has the padding's tokens, and no keys

A graph of decodes alone has no chunks; there each padding token is a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.exec.inputs import Inputs, num_slots
from stoker_engine.exec.kv_cache import KVCachePlan
from stoker_engine.layers.batch_rows import PADDING
from stoker_engine.sizing.step_shapes import StepShape


class GraphInputs:
    """The inputs: attention metadata, the rows of tokens, and for chunks what the host knows of their tokens. Graphs
    gather the other inputs from the per-row values on the device.

    Args:
        shapes: shapes of all graphs.
        max_blocks: maximum number of blocks per sequence and group.
    """

    def __init__(self, shapes: Sequence[StepShape], max_blocks: int, plan: KVCachePlan, device: torch.device) -> None:
        self._plan = plan
        tokens, slots = max(shape.tokens for shape in shapes), max(map(num_slots, shapes))

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_rows = zeros(tokens) + PADDING
        self._ungathered = zeros(tokens), zeros(tokens)
        self._num_decodes = zeros(1, dtype=torch.int32)
        self._seq_lens = zeros(slots, dtype=torch.int32)
        self._query_starts = zeros(slots + 1, dtype=torch.int32)
        self._tables = [zeros(slots, max_blocks, dtype=torch.int32) for _ in plan.groups]
        self._slots = [zeros(tokens) - 1 for _ in plan.groups]

    def token_rows(self, shape: StepShape) -> torch.Tensor:
        """Return the fixed tensor of the rows of a step's tokens, int64 [tokens]."""
        return self._token_rows[: shape.tokens]

    def ungathered(self, shape: StepShape) -> list[torch.Tensor]:
        """Return the fixed tensors of `Inputs.ungathered`."""
        return [values[: shape.tokens] for values in self._ungathered] if shape.has_chunks else []

    def metadata(self, shape: StepShape, planned: np.ndarray) -> AttentionMetadata:
        """Return attention metadata of views of the fixed tensors.

        Args:
            planned: lengths on the host, see `StepGraph.planned`.
        """
        slots = num_slots(shape)
        groups = [
            BlockTables(tables[:slots], mapping[: shape.tokens], group.sliding_window, group.kind)
            for tables, mapping, group in zip(self._tables, self._slots, self._plan.groups, strict=True)
        ]
        return AttentionMetadata(
            query_starts=self._query_starts[: slots + 1],
            seq_lens=self._seq_lens[:slots],
            num_decodes=shape.sequences,
            block_size=self._plan.block_size,
            groups=groups,
            query_starts_host=np.arange(slots + 1, dtype=np.int32),
            seq_lens_host=np.append(planned, np.zeros(slots - len(planned), dtype=np.int32)),
            graph_decodes=self._num_decodes if shape.has_chunks else None,
        )

    def clear(self, shape: StepShape) -> None:
        """Make all tokens padding, for the capture of a shape before any step has filled the inputs."""
        self._query_starts.zero_()
        self._query_starts[num_slots(shape)].fill_(shape.tokens)

    def fill(self, inputs: Inputs) -> None:
        """Copy a step's inputs, padded to a graph's shape, to the fixed addresses."""
        metadata = inputs.metadata
        copied = [
            (self._token_rows, inputs.token_rows),
            *zip(self._ungathered, inputs.ungathered, strict=False),
            *zip(self._slots, (group.slot_mapping for group in metadata.groups), strict=True),
        ]
        of_sequences = [(self._seq_lens, metadata.seq_lens), (self._query_starts, metadata.query_starts)]
        if metadata.graph_decodes is not None:
            of_sequences.append((self._num_decodes, metadata.graph_decodes))
        for pairs in (copied, of_sequences):  # one launch for each dtype
            torch._foreach_copy_([fixed[: len(values)] for fixed, values in pairs], [values for _, values in pairs])
        for tables, group in zip(self._tables, metadata.groups, strict=True):
            tables[: len(group.tables), : group.tables.shape[1]].copy_(group.tables)
