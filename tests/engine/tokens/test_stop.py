"""Stop strings end the text wherever it is split into deltas, and are never part of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_engine.tokens.stop import StopStrings

_letters = st.text("ab", max_size=12)
_pieces = st.lists(st.tuples(_letters, st.booleans()), max_size=8)
_stops = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def feed(watcher: StopStrings, pieces: list[str]) -> tuple[list[str], str | None]:
    texts = []
    for piece in pieces:
        text, found = watcher.add(piece)
        texts.append(text)
        if found is not None:
            return texts, found
    return [*texts, watcher.flush()], None


def naive(stops: list[str], include: bool, pieces: list[tuple[str, bool]]) -> tuple[list[str], str | None]:
    """Do what `StopStrings` does, naively: try each prefix of each string at each position."""
    emitted, text, released, unwatched = list[str](), "", 0, 0
    for piece, watch in pieces:
        for letter in piece:
            text += letter
            if not watch:
                unwatched = len(text)
            found = max((stop for stop in stops if len(text) > unwatched and text.endswith(stop)), key=len, default="")
            if found:
                return [*emitted, text[released : None if include else len(text) - len(found)]], found
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        emitted.append(text[released : len(text) - held])
        released = len(text) - held
    return [*emitted, text[released:]], None


@given(pieces=_pieces, stops=_stops, include=st.booleans())
def test_deltas_equal_those_of_the_naive_search(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    watcher, emitted, found = StopStrings(tuple(stops), include), list[str](), None
    for piece, watch in pieces:
        text, found = watcher.add(piece, watch)
        emitted.append(text)
        if found is not None:
            break
    else:
        emitted.append(watcher.flush())
    assert (emitted, found) == naive(stops, include, pieces)


class CountedText(str):
    """Counts the characters read from it."""

    __slots__ = ("taken",)

    def __getitem__(self, index: Any) -> str:
        part = super().__getitem__(index)
        self.taken = getattr(self, "taken", 0) + len(part)
        return part


@pytest.mark.parametrize("text", ["a" * 2000 + "b", ("a" * 30 + "b") * 64, "ab" * 1000])
@pytest.mark.parametrize("cut", [1, 7, 5000])
def test_stop_strings_are_compared_in_linear_time(text: str, cut: int) -> None:
    stop = CountedText(text[:-1] + "c")
    watcher = StopStrings((stop,))
    for start in range(0, len(text), cut):
        watcher.add(text[start : start + cut])
    assert stop.taken <= 10 * len(text)


def test_possible_starts_of_a_stop_string_are_held_back() -> None:
    watcher = StopStrings(("END",))
    assert watcher.add("the E") == ("the ", None)
    assert watcher.add("N") == ("", None)
    assert watcher.add("T") == ("ENT", None)
    assert watcher.add("END of") == ("", "END")


def test_unwatched_text_may_start_but_not_complete_a_stop_string() -> None:
    watcher = StopStrings(("ab",))
    assert watcher.add("ab a", watch=False) == ("ab ", None)
    assert watcher.add("b") == ("", "ab")
