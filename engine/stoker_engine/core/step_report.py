"""What a step did, in numbers, for the metrics and the log. Plain facts: they cross from one process to another."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_engine.core.finish_reason import FinishReason


@dataclass(frozen=True)
class AdapterStats:
    """What the metrics say of LoRA adapters; counters only grow.

    Attributes:
        running: names of the adapters of sequences that run, sorted.
        waiting: names of those of sequences that wait, sorted.
        loads: how many adapters were read into memory.
        evictions: how many were dropped from memory to make room for others.
        failures: how many loads failed.
        load_seconds: of each load that has finished since the report before.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    loads: int = 0
    evictions: int = 0
    failures: int = 0
    load_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class SchedulerStats:
    """What the metrics say of the scheduler; counters only grow.

    Attributes:
        adapters: None: LoRA is off.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_corrupted: int = 0
    adapters: AdapterStats | None = None


@dataclass(frozen=True)
class FirstToken:
    """A request's first token: seconds since its arrival, and what its prompt took."""

    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class FinishedRequest:
    """A request that ended, all its sequences included. Times are seconds; None where it did not get so far.

    Attributes:
        num_output_tokens: over all sequences.
        longest_output: tokens of the longest sequence.
        queue: from arrival to the first step.
        prefill: from the first step to the first token.
        decode: from the first token to the last.
        http_request_id: see `EngineRequest`.
    """

    id: str
    finish_reason: FinishReason
    n: int
    max_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    longest_output: int
    num_preemptions: int
    e2e: float
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    http_request_id: str | None = None


@dataclass(frozen=True)
class StepTimes:
    """Where a step's time went, in seconds."""

    schedule: float = 0.0
    prepare: float = 0.0
    model: float = 0.0
    sample: float = 0.0
    commit: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        num_tokens: tokens computed.
        num_prompt_tokens: of them, prompt tokens.
        num_new_tokens: tokens generated.
        first_tokens: of the requests that got their first one.
        inter_token: seconds between a sequence's new token and the one before, for those that have one.
        finished: requests that ended in or just before this step, aborted ones included.
        engine: whose step it was, of the model's engines.
    """

    num_tokens: int
    num_prompt_tokens: int
    num_new_tokens: int
    stats: SchedulerStats
    times: StepTimes = StepTimes()
    first_tokens: list[FirstToken] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    engine: int = 0
