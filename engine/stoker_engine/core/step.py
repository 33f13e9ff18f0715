"""Messages between the scheduler and the runner, once per step: what has changed, and what to compute.

The runner keeps a *row* for each running sequence (`exec.input_batch`): its tokens, block tables and sampling
parameters. The whole sequence is sent once, when it gets its row; after that only changes are sent. A step of many
decodes therefore takes a few integers per sequence, independent of their lengths.

    adapters   new contents of adapter slots                ┐
    forks      rows that start as copies of others          │
    new        rows that start empty                        │ in this order,
    written    tokens chosen by the scheduler               │ before anything is computed
    known      tokens sampled by another stage              │
    tables     entries of block tables                      │
    copies     copies of whole blocks                       ┘
    batch      which rows compute which of their tokens, decodes first

Without a pipeline, the runner itself writes the tokens that a step samples into their rows. A step refers to positions
rather than tokens, so the next step can be scheduled and launched before they are known. In a pipeline only the last
stage has the sampled tokens. A sequence with a token in flight is therefore not scheduled there, and all stages receive
the token in `known`.
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
        output_token_ids: tokens generated before a preemption, or before a row was free.
        blocks: block table of each group of layers.
        num_candidates: number of next tokens that a beam offers; 0: not a beam.
        num_prompt_logprobs: number of prompt tokens whose log-probabilities are already computed.
        adapter_slot: slot of its adapter, or `NO_ADAPTER`.
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
    """A row that starts with the first `num_tokens` tokens of row `parent`, and shares the blocks that hold them.

    Attributes:
        index: index of the sequence in its request.
        num_blocks: number of shared blocks in each group of layers.
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
    """One step.

    Attributes:
        number: serial number.
        adapters: (slot, number of the adapter that it holds from this step on).
        written: (row, position of the first token, tokens).
        tables: entries of `TABLE_ENTRY` integers.
        known: entries of `KNOWN_ENTRY` integers, in the order of positions; only for the stages of a pipeline.
        copies: (source, destination) blocks; all are read before any is written.
        rows: row of each sequence in the batch; the first `num_decodes` compute one token each.
        starts: position of the first token that each sequence computes; all earlier ones are in the cache when the step
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
        logprobs: log-probabilities of each token, if requested.
        candidates: for a beam, for which nothing is drawn: (token, log-probability), best first.
        is_corrupted: whether the sequence's logits are NaN or infinite, so that nothing was drawn.
        error: error of the sequence's grammar, because of which nothing was drawn; None: no error.
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
        prompt_logprobs: by batch index, log-probabilities of each prompt token whose predecessor the step computed;
            None if they are NaN or infinite.
        prepare_time, model_time, sample_time: durations in seconds.
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
        """Whether logits of a sequence, or log-probabilities of its prompt, are NaN or infinite."""
        return any(drawn.is_corrupted for drawn in self.sampled) or None in self.prompt_logprobs.values()
