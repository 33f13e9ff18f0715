"""Lookup of keys by their text, and the models that they permit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_gateway.keys.errors import UnauthorizedError
from stoker_gateway.keys.key import KEY_ID, PREFIX, Key, digest_of, new_text
from stoker_gateway.keys.keyring import Keyring

TEXT = st.text(st.sampled_from("ab/*.-ä\n"), max_size=12)


@settings(max_examples=400, deadline=None)
@given(TEXT, TEXT)
def test_a_star_stands_for_any_characters(pattern: str, name: str) -> None:
    reference = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    assert Key("k", "", (pattern,)).may_use(name) == bool(reference.fullmatch(name))


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT), TEXT)
def test_key_permits_models_that_any_pattern_matches_or_all_without_patterns(patterns: list[str], name: str) -> None:
    one_by_one = [Key("k", "", (pattern,)).may_use(name) for pattern in patterns]
    assert Key("k", "", tuple(patterns)).may_use(name) == (any(one_by_one) or not patterns)


def test_patterns_with_many_stars_match_long_names_quickly() -> None:
    assert not Key("k", "", ("a*" * 1000 + "b",)).may_use("a" * 100_000)


@settings(max_examples=100, deadline=None)
@given(st.from_regex(KEY_ID, fullmatch=True))
def test_a_key_is_found_by_its_whole_text_only(key_id: str) -> None:
    text, another = new_text(key_id), new_text(key_id)
    assert text != another and text.startswith(f"{PREFIX}{key_id}-")
    key = Key(key_id, digest_of(text))
    keyring = Keyring([key, Key("other", digest_of(another))]) if key_id != "other" else Keyring([key])
    assert keyring.find(text, 0) is key
    for wrong in ("", text[:-1], text + "0", text.upper(), f" {text}", key.digest, key_id, "ключ", "\0", "x" * 100_000):
        with pytest.raises(UnauthorizedError) as error:
            keyring.find(wrong, 0)
        assert (error.value.status, error.value.code) == (401, "invalid_api_key")
        assert text not in error.value.message and key.digest not in error.value.message


@pytest.mark.parametrize("now", [0.0, 99.999, 100.0, 1e12])
def test_key_is_valid_until_it_expires(now: float) -> None:
    text = new_text("a")
    keyring = Keyring([Key("a", digest_of(text), expires=100.0)])
    if now < 100:
        assert keyring.find(text, now).id == "a"
    else:
        with pytest.raises(UnauthorizedError, match="'a' expired at 1970-01-01T00:01:40Z"):
            keyring.find(text, now)


def test_duplicate_ids_and_digests_are_refused() -> None:
    for second in (Key("a", "2"), Key("b", "1")):
        with pytest.raises(ValueError, match="same"):
            Keyring([Key("a", "1"), second])
    assert Keyring([Key("a", "1")]) == Keyring([Key("a", "1")]) != Keyring([Key("a", "1", ("m",))])
