"""Bar charts fit their width, show every value that is not zero, and survive odd values."""

from __future__ import annotations

import io
import math

import pytest

from stoker_common.bar_chart import Bar, BarChart, bins


def test_stacked_bars_mark_the_limit_and_cut_values_far_above_it() -> None:
    bars = [Bar("fits", (2, 1, 1)), Bar("full", (4, 4, 0)), Bar("exceeds", (6, 3, 0)), Bar("huge", (40, 0, 0))]
    assert BarChart(28, ascii_only=True).stacked(bars, 8) == [
        "   fits  ##=-    |",
        "   full  ####====|",
        "exceeds  ######==|=",
        "   huge  ########|#######>",
    ]  # fmt: skip
    assert BarChart(28).stacked(bars, 8)[0] == "   fits  ██▓▒    │"


@pytest.mark.parametrize("columns", [1, 20, 80, 10_000])
def test_lines_are_as_wide_as_the_terminal_or_readable(columns: int) -> None:
    bars = [Bar("a", (3.0,), "3"), Bar("bc", (0.001,), "few"), Bar("d", (0.0,), "0")]
    lines = BarChart(columns).plain(bars)
    assert max(map(len, lines)) <= min(max(columns, 17), 70)
    assert "▏" in lines[1], "a value that is not zero is visible"
    assert lines[2].split() == ["d", "0"]
    assert BarChart(columns).plain([Bar("zero", (0.0,))]) == ["zero"]
    assert BarChart(columns).plain([]) == []


def test_bins_have_round_limits_and_all_values() -> None:
    assert bins([11.0, 12.5, 19.0, 30.0]) == [
        ("10 - 12", 1), ("12 - 14", 1), ("14 - 16", 0), ("16 - 18", 0), ("18 - 20", 1), ("20 - 22", 0),
        ("22 - 24", 0), ("24 - 26", 0), ("26 - 28", 0), ("28 - 30", 0), ("30 - 32", 1),
    ]  # fmt: skip
    assert bins([*range(1, 41), 5000.0])[-1] == ("40 - 5,000", 2), "an outlier does not hide the other values"
    assert bins([5.0] * 3) == [("5", 3)]
    assert bins([0.0]) == [("0", 1)]
    assert bins([math.nan, math.inf]) == []
    assert sum(count for _, count in bins([1e-9, 1.0, 1e9, math.nan])) == 3
    assert len(bins([1e9, 1e9 + 10])) <= 13


@pytest.mark.parametrize(("encoding", "ascii_only"), [("utf-8", False), ("ascii", True), ("latin-1", True)])
def test_encoding_determines_the_characters(encoding: str, ascii_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "33")
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    chart = BarChart.to(stream)
    assert chart == BarChart(33, ascii_only)
    bars = [Bar("a", (1.0, 2.0, 3.0, 4.0, 5.0), "x")]
    print(chart.legend(["a", "b", "c", "d", "e"]), *chart.stacked(bars, 9), *chart.plain(bars), file=stream)
