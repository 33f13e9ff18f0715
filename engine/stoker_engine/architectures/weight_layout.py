"""Conversion of checkpoint tensors to Stoker's parameters, as data; `models.loading.apply_layout` applies it.

    tensor of the files ── operations ──→ one parameter
                                     └──→ several parameters, split as a `Fused` describes

`HalfSplitPairs` and most splits only reorder rows (a row: the elements along the last dimension). So they can also be
applied to row indices, from which a rank learns the rows that it must read (`weight_names.Destination.moves_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stoker_engine.architectures.model_config import ModelConfig

#: Property of `ModelConfig` that is a count.
Count = Literal["num_experts", "num_attention_heads", "num_key_value_heads"]


@dataclass(frozen=True)
class Transpose:
    """Swap two dimensions."""

    first: int
    second: int


@dataclass(frozen=True)
class AddOne:
    """Add 1, in float32: the stored value is smaller by 1, as in Gemma's norm weights."""


@dataclass(frozen=True)
class HalfSplitPairs:
    """Reorder the rows of each of `heads` heads from rotary pairs (0, 1), (2, 3) … to (0, d/2), (1, d/2 + 1) …"""

    heads: Count


@dataclass(frozen=True)
class ToRow:
    """Convert a vector to a matrix with one row."""


Operation = Transpose | AddOne | HalfSplitPairs | ToRow

#: Operation for matrices stored as [inputs, outputs] (GPT-2's Conv1D).
CONV1D = Transpose(0, 1)


class Split(Enum):
    """Arrangement of several parameters in one tensor of the files."""

    #: Concatenated: all queries, all keys, all values; or the gate, then the up projection.
    ROWS = auto()
    #: By key and value head, each after the query heads that share it (BLOOM, GPT-NeoX, InternLM 2)::
    #:
    #:     │ q q q q k v │ q q q q k v │ …        each letter head_dim rows
    KV_HEADS = auto()
    #: [heads × (key size + value size), latent]: for each head the rows that compute its key, then those for its value.
    LATENT_HEADS = auto()
    #: One row per head or per expert.
    EACH_ROW = auto()
    #: [experts, …]: the matrices of all experts; an expert's several matrices are concatenated by rows.
    EXPERTS = auto()
    #: [experts, outputs, …]: the outputs of an expert's two matrices alternate: gate 0, up 0, gate 1, up 1 …
    INTERLEAVED_EXPERTS = auto()
    #: [experts × size, hidden]: experts concatenated by rows (DBRX).
    FLAT_EXPERTS = auto()


@dataclass(frozen=True)
class Fused:
    """One tensor of the files that contains several parameters.

    Attributes:
        parts: names of the parameters, like the keys of `WeightNames.names`.
        split: arrangement of the parameters.
        for_each: the tensor has `parts` for each of this many experts or heads, whose index is ``{j}`` in the names;
            None: once.
        transposed: whether each expert's matrices are stored as [inputs, outputs].
    """

    parts: tuple[str, ...]
    split: Split
    for_each: Count | None = None
    transposed: bool = False

    def param_names(self, config: ModelConfig) -> list[str]:
        """Return the parameters' names, in the order of the split tensors."""
        if self.for_each is None:
            return list(self.parts)
        count: int = getattr(config, self.for_each)
        return [part.replace("{j}", str(number)) for number in range(count) for part in self.parts]

    @property
    def moves_rows(self) -> bool:
        """Whether splitting only reorders rows. Alternating biases are elements within one row; a transposition changes
        rows."""
        alternating_biases = self.split is Split.INTERLEAVED_EXPERTS and self.parts[0].endswith(".bias")
        return not self.transposed and not alternating_biases

    @property
    def is_by_expert(self) -> bool:
        """Whether a rank can read only its own experts, which are consecutive parts of equal size along the first
        dimension."""
        return self.split in (Split.EXPERTS, Split.INTERLEAVED_EXPERTS, Split.FLAT_EXPERTS)
