"""Statistics of a step for the metrics and the log, in a form that is sent between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker_engine.core.finish_reason import FinishReason


@dataclass(frozen=True)
class AdapterStats:
    """Statistics of LoRA adapters; counters only grow.

    Attributes:
        running: names of the running sequences' adapters, sorted.
        waiting: names of the waiting sequences' adapters, sorted.
        loads: number of successful loads.
        evictions: number of adapters dropped from memory to free space for others.
        failures: number of failed loads.
        load_seconds: duration of each load that has succeeded since the previous report.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    loads: int = 0
    evictions: int = 0
    failures: int = 0
    load_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class SchedulerStats:
    """Statistics of the scheduler; counters only grow.

    Attributes:
        adapters: statistics of LoRA adapters; None: LoRA is off.
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
    """A request's first token: seconds from the request's arrival, and the size of its prompt."""

    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class FinishedRequest:
    """A request whose sequences have all ended. Times are in seconds.

    Attributes:
        num_output_tokens: number of tokens of all sequences.
        longest_output: number of tokens of the longest sequence.
        queue: from arrival to the first step; None: it was never scheduled.
        prefill: from the first step to the first token; None: it has no token.
        decode: from the first token to the last one generated; None: it has no token.
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
    """Durations of a step's parts, in seconds."""

    schedule: float = 0.0
    prepare: float = 0.0
    model: float = 0.0
    sample: float = 0.0
    commit: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """Report of one step.

    Attributes:
        num_tokens: number of computed tokens.
        num_prompt_tokens: number of computed prompt tokens.
        num_new_tokens: number of generated tokens.
        first_tokens: times and prompt sizes of the requests that got their first token in this step.
        inter_token: for each sequence that got tokens in this step and had some before: seconds since its previous
            tokens.
        finished: requests that ended in this step or since the previous report, including aborted ones.
        engine: index of the DP engine.
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
