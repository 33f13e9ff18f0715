"""Timing of the parts of a start."""

from __future__ import annotations

import re

from stoker_engine.core.laps import Laps, describe


def test_lap_times_add_up_to_the_total() -> None:
    laps = [("server", 10.4), ("imports", 13.5), ("files", 13.5), ("weights", 16.25)]
    text = describe(10.0, laps)
    assert text == "6.25 s: server 0.40, imports 3.10, files 0.00, weights 2.75"
    whole, *parts = (float(number) for number in re.findall(r"\d+\.\d+", text))
    assert abs(whole - sum(parts)) < 0.01 * len(parts)


def test_description_without_laps_is_zero() -> None:
    assert describe(10.0, []) == "0.00 s: "


def test_laps_are_in_order() -> None:
    laps = Laps()
    laps.end("first")
    laps.end("second")
    (first, first_end), (second, second_end) = laps.ended
    assert (first, second) == ("first", "second")
    assert first_end <= second_end
