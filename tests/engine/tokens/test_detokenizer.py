"""Concatenated streamed text equals the whole text, for every kind of tokenizer and any tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from stoker_engine.tokens.detokenizer import IncrementalDetokenizer
from stoker_engine.tokens.tokenizer import Tokenizer

TEXTS = [
    "plain words, with punctuation.",
    "emoji 🎉👩‍👩‍👧‍👦🏳️‍🌈 and 漢字かな交じり文 and कॉम्बाइनिंग é ñ",
    " leading, trailing and  double   spaces ",
    "\n\n\ttabs\nand\r\nnewlines",
    "<0x41> looks like a byte token",
]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.add(token) for token in output), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_equals_the_whole_for_any_tokens(backend: Backend, data: st.DataObject, skip: bool) -> None:
    tokenizer = Tokenizer(backend)
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=24))
    whole = backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, [], ids, skip)) == whole == tokenizer.decode(ids, skip)
    split = data.draw(st.integers(0, len(ids)))
    emitted = backend.decode(ids[:split], skip_special_tokens=skip)
    if whole.startswith(emitted) and not emitted.endswith("\ufffd"):
        assert emitted + "".join(stream(tokenizer, ids[:split], ids[split:], skip)) == whole


@settings(max_examples=100, deadline=None)
@given(octets=st.lists(st.sampled_from(list("é漢🎉".encode() + b"a\xff\xed\xa0\xc0\xf4\x90")), max_size=12))
def test_streamed_text_equals_the_whole_for_any_bytes(backend: Backend, octets: list[int]) -> None:
    tokenizer = Tokenizer(backend)
    token_of = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    ids = [token_of[bytes([octet])] for octet in octets if bytes([octet]) in token_of]
    assert "".join(stream(tokenizer, [], ids)) == backend.decode(ids)


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte-level":
        folder: Path = request.getfixturevalue("tiny_llama")
        return Tokenizer.load(folder)
    return Tokenizer.load(request.getfixturevalue("demo_gguf"))


@pytest.mark.parametrize("text", TEXTS)
def test_text_streams_without_partial_characters_from_every_split(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for split in range(len(ids)):
        emitted = tokenizer.decode(ids[:split])
        deltas = stream(tokenizer, ids[:split], ids[split:])
        assert not any("\ufffd" in delta for delta in deltas)
        assert emitted.rstrip("\ufffd") + "".join(deltas) == text


def test_text_is_emitted_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a simple sentence", add_special_tokens=False)
    *deltas, rest = stream(tokenizer, [], ids)
    assert all(deltas)
    assert rest == ""


def test_incomplete_character_is_emitted_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 🦤")
    deltas = stream(tokenizer, ids[:2], ids[2:-1])
    assert tokenizer.decode(ids[:2]) + "".join(deltas) == tokenizer.decode(ids[:-1])


def test_bytes_and_texts_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "hello the wörld 🦤"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert (
        "".join(map(tokenizer.token_text, tokenizer.encode("hello world", add_special_tokens=False))) == "hello world"
    )
