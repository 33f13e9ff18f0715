"""Results of a soak: requests, processes, problems, and the report in Markdown with a picture."""

from __future__ import annotations

import collections
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kit.traffic import Request

from soak import drift_check
from soak.picture import Line, Panel, draw
from soak.samples import Life, Sample

_MIB = 1024**2
#: Requests on a failing pod may end this many seconds before the recorded time of the fault.
_BEFORE_S = 1


@dataclass(frozen=True)
class Strike:
    """A fault that happened; times in seconds since 1970.

    Attributes:
        until: requests to the endpoint that start before this may fail; None for gentle faults.
        recovered: time of full recovery.
    """

    name: str
    began: float
    until: float | None
    recovered: float

    def excuses(self, request: Request) -> bool:
        """Return whether the fault explains a failed request."""
        return self.until is not None and request.end >= self.began - _BEFORE_S and request.start <= self.until


@dataclass
class Record:
    """One soak.

    Attributes:
        requests: by endpoint.
        struck: endpoint that the faults hit; requests to others must never fail.
        problems: deviations, in the order of detection.
    """

    seed: int
    struck: str
    began: float
    lives: list[Life] = field(default_factory=list)
    requests: dict[str, list[Request]] = field(default_factory=lambda: collections.defaultdict(list))
    strikes: list[Strike] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add problems of requests and processes."""
        for endpoint, requests in self.requests.items():
            for request in requests:
                if request.outcome != "ok" and not self._excused(endpoint, request):
                    self.problems.append(f"{endpoint}, after {self._minutes(request.start):.1f} min: {request}")
        for life in self.lives:
            self.problems += _leaks(life)

    def page(self, picture: str) -> str:
        """Return the report in Markdown.

        Args:
            picture: file name of the picture.
        """
        minutes = self._minutes(max((life.samples[-1].when for life in self.lives), default=self.began))
        words = (
            f"Of {time.strftime('%Y-%m-%d')}, by `make soak`, on {os.cpu_count()} processors: {minutes:.0f} minutes, "
            f"seed {self.seed}. Endpoint `{self.struck}` has two pods of the demo model, and faults strike it; the "
            "other one has a pod of a tiny model, which nothing may ever disturb."
        )
        verdict = [f"- {problem}" for problem in self.problems] or ["Nothing was out of order."]
        parts = [
            "# Results of the soak", words, "\n".join(verdict),
            "## Requests", "\n".join(self._request_rows()),
            "*Excused* are those that failed or were cut while an engine had just been killed or frozen.",
            "## Faults", "\n".join(self._strike_rows()),
            "## Processes", f"![Memory and open files over time]({picture})", "\n".join(self._life_rows()),
            "Memory is resident memory. Its slope is that of Theil and Sen over what comes after "
            f"{drift_check.WARM_UP_S} s of warm-up, for half an hour; it may be {drift_check.MEMORY_BYTES // _MIB} MiB "
            f"or {drift_check.MEMORY_SHARE:.0%}. "
            "Files and threads are counted when there are no requests, first and last; after the warm-up they may "
            f"grow by {drift_check.COUNT}. {sum(not _settled(life) for life in self.lives)} processes that "
            f"did not live for {drift_check.ENOUGH_S} s after their warm-up are drawn, but not listed here.",
            self._rest_summary(),
        ]  # fmt: skip
        return "\n\n".join(parts) + "\n"

    def picture(self) -> str:
        """Plot memory and open files of all processes, as SVG."""
        roles = sorted({life.role for life in self.lives if life.role != "tracker"})
        panels = [Panel(f"{role}, MiB", self._lines(role, lambda sample: sample.rss / _MIB)) for role in roles]
        panels += [Panel(f"{role}, open files", self._lines(role, lambda sample: sample.fds)) for role in roles]
        end = max((life.samples[-1].when for life in self.lives), default=self.began)
        bands = [(self._minutes(each.began), self._minutes(each.recovered), each.name) for each in self.strikes]
        return draw(panels, self._minutes(end), bands)

    def counted(self) -> str:
        """Return a progress line."""
        counts = []
        for endpoint, requests in self.requests.items():
            bad = [request for request in requests if request.outcome != "ok"]
            excused = sum(self._excused(endpoint, request) for request in bad)
            counts.append(f"{endpoint} {len(requests)} requests, {excused} excused, {len(bad) - excused} failed")
        return "; ".join(counts)

    def _minutes(self, when: float) -> float:
        return (when - self.began) / 60

    def _excused(self, endpoint: str, request: Request) -> bool:
        return endpoint == self.struck and any(strike.excuses(request) for strike in self.strikes)

    def _lines(self, role: str, value: Callable[[Sample], float]) -> dict[str, list[Line]]:
        """Return the lines of all processes of this role, by owner."""
        lines: dict[str, list[Line]] = {}
        for life in self.lives:
            if life.role == role:
                lines.setdefault(life.owner, []).append(
                    [(self._minutes(each.when), value(each)) for each in life.samples]
                )
        return lines

    def _request_rows(self) -> Iterator[str]:
        """Yield a row per kind of request, with the columns of all endpoints."""
        columns = ("sent", "as due", "excused", "failed", "cut", "median", "longest")
        yield f"| kind | {' | '.join(f'{name}: {column}' for name in self.requests for column in columns)} |"
        yield "|---" * (1 + len(columns) * len(self.requests)) + "|"
        kinds = {request.kind for requests in self.requests.values() for request in requests}
        for kind in [*sorted(kinds), None]:
            cells = [kind or "**all**"]
            for endpoint, requests in self.requests.items():
                cells += self._counts(endpoint, [request for request in requests if kind in (None, request.kind)])
            yield f"| {' | '.join(cells)} |"

    def _counts(self, endpoint: str, requests: list[Request]) -> list[str]:
        bad = [request for request in requests if request.outcome != "ok"]
        unexcused = [request.outcome for request in bad if not self._excused(endpoint, request)]
        seconds = [request.end - request.start for request in requests] or [0.0]
        counts = (
            len(requests), len(requests) - len(bad), len(bad) - len(unexcused),
            unexcused.count("failed"), unexcused.count("cut"),
        )  # fmt: skip
        return [*map(str, counts), f"{statistics.median(seconds):.2f} s", f"{max(seconds):.1f} s"]

    def _strike_rows(self) -> Iterator[str]:
        yield "| after | what happened | all was well after | requests that failed or were cut |"
        yield "|---|---|---|---|"
        for strike in self.strikes:
            bad = [
                request
                for request in self.requests[self.struck]
                if request.outcome != "ok" and request.end >= strike.began and request.start <= strike.recovered
            ]
            after, recovery = self._minutes(strike.began), strike.recovered - strike.began
            yield f"| {after:.1f} min | {strike.name} | {recovery:.0f} s | {len(bad)} |"

    def _life_rows(self) -> Iterator[str]:
        yield "| process | pod | lived | memory | slope | files | threads |"
        yield "|---|---|---|---|---|---|---|"
        for life in sorted(self.lives, key=lambda life: (life.role, -life.seconds)):
            first, last = life.samples[0], life.samples[-1]
            points = _settled(life)
            if not points:
                continue
            at_rest = life.at_rest or [first, last]
            cells = [
                life.role, life.pod, f"{life.seconds / 60:.1f} min",
                f"{first.rss / _MIB:.0f} → {last.rss / _MIB:.0f} MiB",
                f"{drift_check.growth(points) / _MIB:+.1f} MiB",
                f"{at_rest[0].fds} → {at_rest[-1].fds}", f"{at_rest[0].threads} → {at_rest[-1].threads}",
            ]  # fmt: skip
            yield f"| {' | '.join(cells)} |"

    def _rest_summary(self) -> str:
        if not self.rests:
            return ""
        return (
            f"{len(self.rests)} times the traffic paused, and at most {max(self.rests):.1f} s later every pod reported "
            "no request in flight, running or waiting, and no block of the KV cache in use."
        )


def _settled(life: Life) -> list[drift_check.Point]:
    return drift_check.settled([(sample.when, sample.rss) for sample in life.samples], life.samples[0].when)


def _leaks(life: Life) -> Iterator[str]:
    """Yield the leaks of a process."""
    points = _settled(life)
    if points and not drift_check.memory_is_flat(points):
        yield f"{life.role} of {life.pod}: memory grows by {drift_check.growth(points) / _MIB:.1f} MiB in half an hour"
    settled = [sample for sample in life.at_rest if sample.when >= life.samples[0].when + drift_check.WARM_UP_S]
    for resource, counts in (
        ("open files", [sample.fds for sample in settled]),
        ("threads", [sample.threads for sample in settled]),
    ):
        if not drift_check.count_is_flat(counts):
            yield f"{life.role} of {life.pod}: {resource} grew at rest, {counts}"
