"""Expansion of ``$(NAME)``, as by Kubernetes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_operator.manifests.variables import escape, expand


@given(st.text(alphabet="$()AB", max_size=20), st.dictionaries(st.sampled_from(["A", "B", "AB", ""]), st.text()))
def test_escaped_text_expands_to_itself(text: str, values: dict[str, str]) -> None:
    assert expand(escape(text), values) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y$(B)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(A", "$(A"),
        ("$A $", "$A $"),
    ],
)
def test_variables_are_expanded(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected
