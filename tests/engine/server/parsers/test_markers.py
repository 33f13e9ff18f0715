"""Markers are found wherever the text is split, and only text that may become a marker is held back."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import pytest

from stoker_engine.server.parsers.markers import MarkedText, Markers


def split(markers: Markers, pieces: Iterable[str]) -> list[str]:
    """Split text into text, marker, text, marker, …, text."""
    text = MarkedText()
    found = [""]
    for piece in pieces:
        text.feed(piece)
        marker: str | None = ""
        while marker is not None:
            before, marker = text.until(markers)
            found[-1] += before
            if marker is not None:
                found += [marker, ""]
    found[-1] += text.rest()
    return found


def test_markers_split_text_like_a_regex_however_it_arrives() -> None:
    draw = random.Random(0)
    found = 0
    for _ in range(3_000):
        texts = {"".join(draw.choices("ab<", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 3))}
        try:
            markers = Markers(*texts)
        except ValueError:
            continue
        text = "".join(draw.choices("ab<", k=draw.randint(0, 20)))
        expected = re.split(f"({'|'.join(map(re.escape, texts))})", text)
        at = draw.randint(0, len(text))
        for pieces in ([text], text, [text[:at], text[at:]]):
            assert split(markers, pieces) == expected
        found += len(expected) > 1
    assert found > 500


def test_only_text_that_may_become_a_marker_is_held_back() -> None:
    draw = random.Random(1)
    texts = ("<think>", "<th1>", "]]>")
    for _ in range(500):
        text = "".join(draw.choices(("<", "t", "th", "<thin", "k", "]", "x"), k=8))
        reading = MarkedText()
        reading.feed(text)
        emitted, marker = reading.until(Markers(*texts))
        if marker is None:
            held = max(n for n in range(len(text) + 1) if not n or any(t.startswith(text[-n:]) for t in texts))
            assert emitted == text[: len(text) - held]


@pytest.mark.parametrize("texts", [("",), ("<a>", "a"), ("<tool", "<tool>")])
def test_markers_within_each_other_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="part of another"):
        Markers(*texts)
