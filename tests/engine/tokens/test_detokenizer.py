"""Streamed text, joined, is the whole text; stop strings never leak."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_engine.tokens.detokenizer import IncrementalDetokenizer
from stoker_engine.tokens.stop import StopStrings
from stoker_engine.tokens.tokenizer import Tokenizer

TEXTS = [
    "plain words, with punctuation.",
    "emoji 🎉👩‍👩‍👧‍👦🏳️‍🌈 and 漢字かな交じり文 and कॉम्बाइनिंग é ñ",
    " leading, trailing and  double   spaces ",
    "\n\n\ttabs\nand\r\nnewlines",
    "<0x41> looks like a byte token",
]


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte-level":
        folder: Path = request.getfixturevalue("tiny_llama")
        return Tokenizer.load(folder)
    return Tokenizer.load(request.getfixturevalue("demo_gguf"))


@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_are_the_whole_text_from_every_split(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    assert whole == text
    for split in range(1, len(ids)):
        told = tokenizer.decode(ids[:split])
        if told.endswith("\ufffd"):
            continue  # a prompt that ends inside a character has no text of its own to continue
        detokenizer = IncrementalDetokenizer(tokenizer, ids[:split])
        deltas = [detokenizer.add(token) for token in ids[split:]]
        assert not any("\ufffd" in delta for delta in deltas)
        assert told + "".join(deltas) + detokenizer.flush() == whole


def test_an_incomplete_character_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 🦤")
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:2])
    text = "".join(detokenizer.add(token) for token in ids[2:-1]) + detokenizer.flush()
    assert tokenizer.decode(ids[:2]) + text == tokenizer.decode(ids[:-1])


_letters = st.text("ab", max_size=12)


@given(pieces=st.lists(_letters, max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_end_the_text_wherever_it_is_cut(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    watcher, told, found = StopStrings(tuple(stop)), "", None
    for piece in pieces:
        delta, found = watcher.add(piece)
        told += delta
        if found is not None:
            break
        assert not any(string in told for string in stop)
    if found is None:
        told += watcher.flush()
        assert told == text
        assert not any(string in text for string in stop)
    else:
        assert text.startswith(told + found)
        assert not any(string in told for string in stop)
