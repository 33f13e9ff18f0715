"""A load pauses as long as it has worked, after a minimum of work."""

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
    worked += 0.0031  # work that was too short for a pause also counts
    paced.give_way()
    paced.give_way()
    assert pauses == [pytest.approx(0.004 * pace._PAUSE)]
