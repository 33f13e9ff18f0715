"""What attention must know about a step, computed once and shared by all layers.

The batch is flat: sequence s has the rows `query_starts[s]` … `query_starts[s + 1] - 1`, and these are its last
tokens of `seq_lens[s]`. Sequences that compute one token (*decodes*) lie first.

    flat batch   │ d0 │ d1 │ d2 │ c0 c0 c0 c0 │ c1 c1 │        query_starts  0 1 2 3 7 9
    rows           0    1    2    3 … 6         7 8

Layers that keep the same tokens share block tables: a *group* (see `sizing.cache_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Where one group of layers has its keys and values.

    Attributes:
        tables: [sequences, blocks] int32 block numbers; `NULL_BLOCK` past a sequence's end and where a window has left
            them.
        slot_mapping: [tokens] int64 where each new token goes: block × block_size + offset; -1: nowhere. Empty where
            the kind is "state".
        sliding_window: tokens that the group's layers see back, the current one included; None: all.
        kind: "state" where the layers keep no tokens but a state of each sequence, whose blocks the tables name.
    """

    tables: torch.Tensor
    slot_mapping: torch.Tensor
    sliding_window: int | None = None
    kind: Literal["tokens", "state"] = "tokens"


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's attention inputs. A backend plans the step by them, once (`attention.backend`).

    Attributes:
        query_starts: [sequences + 1] int32.
        seq_lens: [sequences] int32; tokens known once this step has run; 0: it is nobody's, only there because a CUDA
            graph has as many.
        num_decodes: how many of the first sequences compute one token.
        block_size: tokens in a block.
        groups: block tables by group.
        query_starts_host, seq_lens_host: the same numbers on the host.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    block_size: int
    groups: list[BlockTables]
    query_starts_host: np.ndarray
    seq_lens_host: np.ndarray
