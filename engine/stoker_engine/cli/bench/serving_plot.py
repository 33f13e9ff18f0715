"""``stoker bench serve --plot``: distributions of TTFT and ITL, and tokens per second over time, as bar charts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Protocol

from stoker_common.bar_chart import Bar, BarChart

_INTERVALS: Final = 12


class TimedAnswer(Protocol):
    """The part of an answer that is plotted; times in seconds.

    Attributes:
        start: when the request was sent, since the benchmark's start.
        ttft: time to the first token.
        itl: times between the following events.
        output_len: number of tokens, of which an event may have several.
    """

    start: float
    ttft: float
    itl: list[float]
    output_len: int


def chart_lines(answers: Sequence[TimedAnswer], duration: float, chart: BarChart) -> list[str]:
    """Return the charts of the successful answers of a benchmark that took `duration` seconds."""
    if not answers:
        return ["nothing to plot: no request succeeded"]
    sections = {
        "Time to First Token (ms): number of requests": chart.histogram([1000 * answer.ttft for answer in answers]),
        "Inter-token Latency (ms): number of intervals": chart.histogram(
            [1000 * gap for answer in answers for gap in answer.itl]
        ),
        "Output tokens per second, from second": chart.plain(_rates(answers, duration)),
    }
    return [line for title, lines in sections.items() if lines for line in ("", title, *lines)][1:]


def _rates(answers: Sequence[TimedAnswer], duration: float) -> list[Bar]:
    """Return the tokens per second in equal intervals of the benchmark."""
    tokens = [0.0] * _INTERVALS
    for answer in answers:
        events = list(accumulate([answer.start + answer.ttft, *answer.itl]))
        for at in events:
            index = int(_INTERVALS * at / duration)
            tokens[min(index, _INTERVALS - 1)] += answer.output_len / len(events)
    seconds = duration / _INTERVALS
    digits = 1 if seconds >= 1 else 3
    return [
        Bar(f"{index * seconds:,.{digits}f}", (count / seconds,), f"{count / seconds:,.1f}")
        for index, count in enumerate(tokens)
    ]
