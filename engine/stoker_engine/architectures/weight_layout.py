"""How a checkpoint's tensor holds parameters of ours, as data: `models.loading.apply_layout` does it with torch.

    tensor of the files ── operations ──→ one parameter
                                     └──→ several, which a `Fused` says how to take apart

An operation on rows (the numbers along the last dimension) may only move them about. Then it works on rows of anything:
also on their numbers, from which a rank learns which ones it must read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stoker_engine.architectures.model_config import ModelConfig

#: A property of `ModelConfig`.
Count = Literal["num_experts", "num_attention_heads", "num_key_value_heads"]


@dataclass(frozen=True)
class Transpose:
    """Two dimensions are swapped."""

    first: int
    second: int


@dataclass(frozen=True)
class AddOne:
    """Stored less by one, as Gemma's norm weights are; float32."""


@dataclass(frozen=True)
class HalfSplitPairs:
    """Rows of each of so many heads in rotary pairs (0, 1), (2, 3) … → (0, d/2), (1, d/2 + 1) …"""

    heads: Count


@dataclass(frozen=True)
class ToRow:
    """A vector becomes a matrix of one row."""


Operation = Transpose | AddOne | HalfSplitPairs | ToRow

#: Inputs in rows instead of outputs (GPT-2's Conv1D).
CONV1D = Transpose(0, 1)


class Split(Enum):
    """How parameters lie in one tensor of the files."""

    #: One after the other: all queries, all keys, all values; or the gate, then the up projection.
    ROWS = auto()
    #: One key and value head after the other, each behind the queries that share it (BLOOM, GPT-NeoX, InternLM 2)::
    #:
    #:     │ q q q q k v │ q q q q k v │ …        each letter head_dim rows
    KV_HEADS = auto()
    #: [heads × (key and value), latent]: what makes each head's key, and below it what makes its value.
    LATENT_HEADS = auto()
    #: A row for each head, or each expert.
    EACH_ROW = auto()
    #: [experts, …]: all experts' matrices; where an expert has several, one below the other.
    EXPERTS = auto()
    #: [experts, outputs, …]: the outputs of an expert's two matrices alternate: gate 0, up 0, gate 1, up 1 …
    INTERLEAVED_EXPERTS = auto()
    #: [experts × size, hidden]: experts below each other (DBRX).
    FLAT_EXPERTS = auto()


@dataclass(frozen=True)
class Fused:
    """One tensor of the files that holds several parameters.

    Attributes:
        parts: these, spelled like the keys of `WeightNames.names`.
        for_each: the parts are those of so many experts or heads, one after the other, whose number is ``{j}``.
        transposed: each expert's matrices have inputs in rows instead of outputs.
    """

    parts: tuple[str, ...]
    split: Split
    for_each: Count | None = None
    transposed: bool = False

    def param_names(self, config: ModelConfig) -> list[str]:
        """The parameters, in the order in which the tensor holds them."""
        if self.for_each is None:
            return list(self.parts)
        count: int = getattr(config, self.for_each)
        return [part.replace("{j}", str(number)) for number in range(count) for part in self.parts]

    @property
    def moves_rows(self) -> bool:
        """Whether taking it apart only moves rows about. Biases that alternate are numbers of one row."""
        alternating_biases = self.split is Split.INTERLEAVED_EXPERTS and self.parts[0].endswith(".bias")
        return not self.transposed and not alternating_biases

    @property
    def is_by_expert(self) -> bool:
        """Whether experts lie one after the other along the first dimension, each in as much of it. So a rank that has
        some of them reads no others."""
        return self.split in (Split.EXPERTS, Split.INTERLEAVED_EXPERTS, Split.FLAT_EXPERTS)
