"""What travels between the scheduler and those who run the model, once a step: what changed, and what to compute.

Who runs the model keeps *rows* (`exec.input_batch`): of each running sequence the tokens, the block tables, and how it
samples. A sequence comes whole once, when it gets its row; from then on only changes come. So a step of many decodes
is a few numbers a sequence, however long they are.

    adapters   what slots hold from now on                  ┐
    forks      rows that begin as copies of others          │
    new        rows that begin from nothing                 │ in this order,
    written    tokens that only the scheduler decides       │ before anything is computed
    known      tokens that another stage has sampled        │
    tables     entries of block tables                      │
    copies     blocks, whole                                ┘
    batch      which rows compute which of their tokens, decodes first

Tokens that a step samples are written into their rows by the runner itself. So the next step can be scheduled, and
launched, while they are not yet known: it names positions, not tokens. In a pipeline only the last stage would have
them. There, a sequence that awaits a token is not scheduled, and all stages are told of it in `known`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.logprobs import TokenLogprobs

#: Numbers of an entry of `Step.tables`: (group, row, index, block).
TABLE_ENTRY = 4

#: Numbers of an entry of `Step.known`: (row, position, token).
KNOWN_ENTRY = 3


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A row that begins: all that is known of its sequence.

    Attributes:
        index: which of its request's sequences.
        output_token_ids: generated before, where it was preempted or had to wait for a row.
        blocks: for each group of layers, its block table.
        num_candidates: of a beam: how many likeliest next tokens it offers.
        num_prompt_logprobs: prompt tokens whose log-probabilities are known already.
        adapter_slot: the slot of its adapter; `NO_ADAPTER`: it has none.
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
    """A row that begins with the first `num_tokens` tokens of row `parent`, and the blocks that hold them.

    Attributes:
        index: which of its request's sequences.
        num_blocks: for each group of layers, how many these are.
    """

    row: int
    parent: int
    index: int
    num_tokens: int
    num_blocks: list[int]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, to be verified: those of the batch's sequence number `batch_index`."""

    batch_index: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        number: counts steps.
        adapters: (slot, number of the adapter that it holds from this step on).
        written: (row, position of the first, tokens).
        tables: entries of `TABLE_ENTRY` numbers.
        known: entries of `KNOWN_ENTRY` numbers, in the order of positions; of the stages of a pipeline.
        copies: (from, to); all are read before any is written.
        rows: the batch, a number a sequence; the first `num_decodes` compute one token each.
        starts: position of the first token that each computes; all before it are in the cache.
        lengths: how many tokens each computes, drafts included.
        num_samples: how many next tokens are drawn for each; 0 where its known tokens are not all computed then.
        drafts: what follows the last known token of some.
        num_tokens: the sum of `lengths`.
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
    """What was drawn for one sequence.

    Attributes:
        token_ids: for each of its `num_samples` children the tokens that follow, in order: one, or those of its draft
            that hold and one more. The first child is the sequence itself.
        logprobs: of each of them, when asked for.
        candidates: of a beam, which draws nothing: (token, log-probability), best first.
        is_corrupted: its logits are no numbers that a token can be chosen by, so that nothing was drawn.
        error: why its grammar cannot go on, so that nothing was drawn.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]] | None = None
    candidates: list[tuple[int, float]] | None = None
    is_corrupted: bool = False
    error: str | None = None

    def __reduce__(self) -> tuple[type[Sampled], tuple[object, ...]]:
        """Pickled as a call: twice as fast as the dictionary that slots are pickled as, hundreds of times a step."""
        return Sampled, (self.token_ids, self.logprobs, self.candidates, self.is_corrupted, self.error)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed.

    Attributes:
        sampled: for each sequence of the batch with `num_samples`, in order.
        prompt_logprobs: by index in the batch, of the prompt tokens that follow what it computed; None where they are
            no numbers.
        prepare_time, model_time, sample_time: seconds.
        pooled: by index in the batch, the vector of each sequence whose hidden states were pooled.
    """

    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[TokenLogprobs] | None] = field(default_factory=dict)
    prepare_time: float = 0.0
    model_time: float = 0.0
    sample_time: float = 0.0
    pooled: dict[int, list[float]] = field(default_factory=dict)

    @property
    def is_corrupted(self) -> bool:
        """Whether there are results that are no numbers."""
        return any(drawn.is_corrupted for drawn in self.sampled) or None in self.prompt_logprobs.values()
