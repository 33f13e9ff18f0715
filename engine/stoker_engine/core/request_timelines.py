"""Records the times of requests' events for the reports of steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import TokenDelta
from stoker_engine.core.request import Request
from stoker_engine.core.step_report import FinishedRequest, FirstToken, SchedulerStats, StepReport, StepTimes


@dataclass
class _Timeline:
    """Events of one request; times are in seconds of the monotonic clock."""

    request: Request
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict)  # time of the last token, by index of the sequence
    lengths: dict[int, int] = field(default_factory=dict)  # number of output tokens, by index of the sequence


class RequestTimelines:
    """Keeps the timelines of unfinished requests, and statistics of requests that ended since the last report."""

    def __init__(self) -> None:
        self._timelines: dict[str, _Timeline] = {}
        self._finished: list[FinishedRequest] = []

    @property
    def has_news(self) -> bool:
        """Whether requests have ended that no report has included."""
        return bool(self._finished)

    def arrived(self, request: Request) -> None:
        """Start the timeline of a new request."""
        self._timelines[request.id] = _Timeline(request)

    def scheduled(self, requests: Iterable[Request], now: float) -> None:
        """Record that requests are scheduled for the first time."""
        for request in requests:
            self._timelines[request.id].scheduled = now

    def ended(self, request: Request, now: float) -> None:
        """Record the end of a request for any reason."""
        timeline = self._timelines.pop(request.id)
        first, last = timeline.first_token, timeline.last_token
        self._finished.append(
            FinishedRequest(
                id=request.id,
                finish_reason=request.finish_reason or FinishReason.ABORT,
                n=request.spec.num_sequences,
                max_tokens=request.spec.max_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached or 0,
                num_output_tokens=sum(timeline.lengths.values()),
                longest_output=max(timeline.lengths.values(), default=0),
                num_preemptions=request.num_preemptions,
                e2e=now - request.spec.arrival_time,
                queue=None if timeline.scheduled is None else timeline.scheduled - request.spec.arrival_time,
                prefill=None if first is None or timeline.scheduled is None else first - timeline.scheduled,
                decode=None if first is None or last is None else last - first,
                http_request_id=request.spec.http_request_id,
            )
        )

    def report(
        self,
        num_tokens: int,
        num_prompt_tokens: int,
        deltas: list[TokenDelta],
        stats: SchedulerStats,
        times: StepTimes,
        now: float,
    ) -> StepReport:
        """Build the report of a step that has ended, and record the end of requests that it finished.

        Args:
            num_tokens: number of computed tokens.
            num_prompt_tokens: number of computed prompt tokens.
        """
        first_tokens, inter_token = list[FirstToken](), list[float]()
        ended: dict[str, Request] = {}
        num_new_tokens = 0
        for delta in deltas:
            timeline = self._timelines[delta.request_id]
            if count := len(delta.token_ids):
                num_new_tokens += count
                index, last_tokens = delta.index, timeline.last_tokens
                if index in last_tokens:
                    inter_token.append(now - last_tokens[index])
                elif timeline.first_token is None:
                    timeline.first_token = now
                    spec = timeline.request.spec
                    first_tokens.append(
                        FirstToken(now - spec.arrival_time, timeline.request.num_prompt_tokens, delta.num_cached_tokens)
                    )
                last_tokens[index] = timeline.last_token = now
                timeline.lengths[index] = timeline.lengths.get(index, 0) + count
            if delta.finish_reason is not None and not timeline.request.live:
                ended[delta.request_id] = timeline.request
        for request in ended.values():
            self.ended(request, now)
        finished, self._finished = self._finished, []
        return StepReport(
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            stats=stats,
            times=times,
            first_tokens=first_tokens,
            inter_token=inter_token,
            finished=finished,
        )
