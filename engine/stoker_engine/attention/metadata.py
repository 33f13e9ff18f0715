"""Attention metadata of a step, computed once and shared by all layers.

The batch is flat: sequence s has the rows `query_starts[s]` … `query_starts[s + 1] - 1`, which are the last of its
`seq_lens[s]` tokens. Sequences that compute one token (*decodes*) come first.

    flat batch   │ d0 │ d1 │ d2 │ c0 c0 c0 c0 │ c1 c1 │        query_starts  0 1 2 3 7 9
    rows           0    1    2    3 … 6         7 8

The layers of a *group* keep the same tokens and share block tables (see `sizing.cache_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Block tables of one group of layers.

    Attributes:
        tables: [sequences, blocks] int32 block numbers. Entries of tokens that no query sees must not be read: they are
            `NULL_BLOCK`, blocks not released yet, or in a CUDA graph those of an earlier step.
        slot_mapping: [tokens] int64 slot of each new token: block × block_size + offset; -1: padding of a CUDA graph,
            which is not stored. Empty if the kind is "state".
        sliding_window: number of tokens visible to the group's layers, including the current one; None: all.
        kind: "tokens": the blocks hold keys and values; "state": they hold one state per sequence.
    """

    tables: torch.Tensor
    slot_mapping: torch.Tensor
    sliding_window: int | None = None
    kind: Literal["tokens", "state"] = "tokens"


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Attention inputs of one step, from which a backend makes its plan (`attention.backend`).

    Attributes:
        query_starts: [sequences + 1] int32.
        seq_lens: [sequences] int32 number of tokens, including those of this step; 0: padding to the shape of a CUDA
            graph, whose tokens get 0 from attention.
        num_decodes: number of decodes; these are the first sequences. In a CUDA graph of steps with chunks, an upper
            bound, since each sequence may be a decode or a chunk.
        block_size: tokens per block.
        groups: block tables by group.
        query_starts_host, seq_lens_host: the same values on the host; in a CUDA graph, for which attention is planned
            once, `seq_lens_host` has the lengths for which there is room.
        graph_decodes: [1] int32, the number of decodes in a CUDA graph of steps with chunks; None: `num_decodes`.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    block_size: int
    groups: list[BlockTables]
    query_starts_host: np.ndarray
    seq_lens_host: np.ndarray
    graph_decodes: torch.Tensor | None = None
