"""A load pauses as long as it has worked, and not before it has worked for a moment."""

from __future__ import annotations

import pytest

from stoker_engine.lora import pace


def test_pauses_follow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    worked, pauses = 10.0, list[float]()
    monkeypatch.setattr(pace.time, "thread_time", lambda: worked)
    monkeypatch.setattr(pace.time, "sleep", pauses.append)
    paced = pace.Pace()
    paced.give_way()
    worked += 0.0009
    paced.give_way()
    assert not pauses
    worked += 0.0031  # what was too short to pause for counts, too
    paced.give_way()
    paced.give_way()
    assert pauses == [pytest.approx(0.004 * pace._PAUSE)]
