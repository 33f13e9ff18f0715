"""The user's view of loading: progress, without a line for each tensor."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from stoker_engine.exec import loading_view
from stoker_engine.exec.loading_view import LoadingView


class Terminal(io.StringIO):
    """A terminal that shows a progress bar."""

    def isatty(self) -> bool:
        return True


def test_progress_is_logged_at_intervals(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = 100.0
    monkeypatch.setattr(loading_view.time, "monotonic", lambda: now)
    calls: list[float] = []
    view = LoadingView(lambda: calls.append(now))
    view(0, 0)  # the total is not known yet
    for done in range(101):
        now += 0.25
        view(done * 10**8, 10**10)
    assert len(calls) == 102
    assert [record.getMessage() for record in caplog.records] == [
        "loading: 3.9 of 10.0 GB of weights (39%)",
        "loading: 7.9 of 10.0 GB of weights (79%)",
    ]


def test_a_terminal_shows_a_progress_bar(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    view = LoadingView(lambda: None)
    for done in range(0, 1001, 10):
        view(done * 10**6, 10**9)
    assert "Loading weights: 100%" in terminal.getvalue()
    assert "1.00G/1.00G" in terminal.getvalue()
    assert not caplog.records
