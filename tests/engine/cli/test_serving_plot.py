"""``stoker bench serve --plot``: what the charts count."""

from __future__ import annotations

from stoker_common.bar_chart import BarChart
from stoker_engine.cli.bench.serving import ChatAnswer
from stoker_engine.cli.bench.serving_plot import chart_lines

CHART = BarChart(60)


def test_tokens_are_counted_when_they_arrive() -> None:
    # Two events with two tokens each, at 2.5 and 11.5 of 12 seconds.
    lines = chart_lines([ChatAnswer(3, start=1.0, ttft=1.5, itl=[9.0], output_len=4)], 12.0, CHART)
    assert lines[0].startswith("Time to First Token")
    assert lines[1].split()[0] == "1500"
    rates = lines[lines.index("Output tokens per second, from second") + 1 :]
    assert [line.split()[-1] for line in rates] == ["0.0"] * 2 + ["2.0"] + ["0.0"] * 8 + ["2.0"]


def test_requests_of_one_token_have_no_intervals() -> None:
    lines = chart_lines([ChatAnswer(3, ttft=0.1, output_len=1)] * 2, 0.1, CHART)
    assert not [line for line in lines if "Inter-token" in line]


def test_a_run_without_successes_plots_nothing() -> None:
    assert chart_lines([], 1.0, CHART) == ["nothing to plot: no request succeeded"]
