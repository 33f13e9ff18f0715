"""Messages between the scheduler and the runner, once per step: what has changed, and what to compute.

The runner keeps a *row* for each running sequence (`exec.input_batch`): its tokens, block tables and sampling
parameters. A new row gets the whole sequence, or a copy of another row; after that only changes are sent. A step of
many decodes therefore takes a few integers per sequence, independent of the sequence's length.

    adapters   new contents of adapter slots                ┐
    forks      rows that start as copies of others          │
    new        rows that start with a whole sequence        │ in this order,
    written    last tokens of forks and beams               │ before anything is computed
    known      tokens sampled by a pipeline's last stage    │
    tables     entries of block tables                      │
    copies     copies of whole blocks                       ┘
    batch      which rows compute which of their tokens, decodes first

Without a pipeline, the runner itself writes sampled tokens into the rows that the step computed. A step refers to
positions rather than tokens, so the next step can be scheduled and launched before the tokens are known. In a pipeline
only the last stage has the sampled tokens. A sequence with a token in flight is therefore not scheduled there, and all
stages receive the token with a later step.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.logprobs import TokenLogprobs

#: Integers per entry of `Step.tables`: (group, row, index, block).
TABLE_ENTRY = 4

#: Integers per entry of `Step.known`: (row, position, token).
KNOWN_ENTRY = 3


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A new row, with the complete state of its sequence.

    Attributes:
        index: index of the sequence in its request.
        output_token_ids: tokens generated so far.
        blocks: block table of each group of layers.
        num_candidates: number of next tokens that a beam offers; 0: not a beam.
        num_prompt_logprobs: number of prompt tokens whose log-probabilities are already computed.
        adapter_slot: slot of the sequence's adapter, or `NO_ADAPTER`.
    """

    row: int
    spec: EngineRequest
    index: int
    output_token_ids: list[int]
    blocks: list[list[int]]
    num_candidates: int = 0
    num_prompt_logprobs: int = 0
    adapter_slot: int = NO_ADAPTER


@dataclass(frozen=True, slots=True)
class Fork:
    """A row that starts with the first `num_tokens` tokens of row `parent`, and shares their KV-cache blocks.

    Attributes:
        index: index of the sequence in its request.
        num_blocks: for each group of layers, number of block-table entries that are copied.
    """

    row: int
    parent: int
    index: int
    num_tokens: int
    num_blocks: list[int]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed next tokens of the sequence at `batch_index`, to be verified."""

    batch_index: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """What the runner changes and computes in one step.

    Attributes:
        adapters: (slot, number of the adapter that it holds from this step on).
        written: (row, position of the first token, tokens).
        tables: entries of `TABLE_ENTRY` integers.
        known: entries of `KNOWN_ENTRY` integers, for each row in the order of positions; empty without a pipeline.
        copies: (source, destination) blocks; all are read before any is written.
        rows: row of each sequence in the batch; the first `num_decodes` of these compute one token each.
        starts: position of the first token that each sequence computes; earlier tokens are in the cache when the step
            runs.
        lengths: number of tokens each sequence computes, including drafts.
        num_samples: for each sequence, number of children (itself and its forks) that draw next tokens; 1 for a beam; 0
            if known tokens remain uncomputed.
        drafts: drafts that follow the last known token of some sequences.
        num_tokens: sum of `lengths`.
    """

    number: int
    rows: array[int]
    starts: array[int]
    lengths: array[int]
    num_samples: array[int]
    num_decodes: int
    num_tokens: int
    adapters: list[tuple[int, int]] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    written: list[tuple[int, int, list[int]]] = field(default_factory=list)
    tables: array[int] = field(default_factory=lambda: array("i"))
    known: array[int] = field(default_factory=lambda: array("i"))
    copies: list[tuple[int, int]] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """Tokens drawn for one sequence.

    Attributes:
        token_ids: for each of its `num_samples` children, the next tokens in order: one, or the accepted tokens of its
            draft and one more. The first child is the sequence itself.
        logprobs: log-probabilities of each of `token_ids`, if requested.
        candidates: for a beam, for which nothing is drawn: (token, log-probability), best first.
        is_corrupted: whether nothing was drawn because logits are NaN or infinite.
        error: why nothing was drawn: an error of the sequence's grammar, or the request allows no token with a finite
            logit; None: no error.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]] | None = None
    candidates: list[tuple[int, float]] | None = None
    is_corrupted: bool = False
    error: str | None = None

    def __reduce__(self) -> tuple[type[Sampled], tuple[object, ...]]:
        """Pickle as a constructor call, which is twice as fast as the default for slots; a step pickles hundreds."""
        return Sampled, (self.token_ids, self.logprobs, self.candidates, self.is_corrupted, self.error)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step.

    Attributes:
        sampled: one entry for each sequence of the batch with `num_samples` above 0, in order.
        prompt_logprobs: by batch index, requested log-probabilities of prompt tokens whose predecessors the step
            computed; None if logits are NaN or infinite.
        prepare_time, model_time, sample_time: durations of the step's parts in seconds.
        pooled: by batch index, the vector of each sequence whose hidden states were pooled.
    """

    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[TokenLogprobs] | None] = field(default_factory=dict)
    prepare_time: float = 0.0
    model_time: float = 0.0
    sample_time: float = 0.0
    pooled: dict[int, list[float]] = field(default_factory=dict)

    @property
    def is_corrupted(self) -> bool:
        """Whether logits of an output or of a prompt are NaN or infinite."""
        return any(drawn.is_corrupted for drawn in self.sampled) or None in self.prompt_logprobs.values()
