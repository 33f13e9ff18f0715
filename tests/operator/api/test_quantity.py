"""Quantities are parsed as by Kubernetes, at a cost that does not depend on their value."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_operator.api.quantity import LARGEST, amount
from stoker_operator.api.v1alpha1.base import QUANTITY_PATTERN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4, 4),
        ("500m", Decimal("0.5")),
        ("16Gi", 16 * 1024**3),
        ("1.5Gi", 3 * 1024**3 // 2),
        (".5", Decimal("0.5")),
        ("5.", 5),
        ("+5", 5),
        ("-5", -5),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        ("1e-3", Decimal("0.001")),
        ("12e-1", Decimal("1.2")),
        # Kubernetes keeps nine decimals, rounded up, and no more than 2^63 - 1.
        ("0.1n", Decimal("1e-9")),
        ("1e-999999", Decimal("1e-9")),
        ("-1e-999999", Decimal("-1e-9")),
        ("0e999999999", 0),
        ("8Ei", LARGEST),
        ("1e999999", LARGEST),
        ("1e99999999", LARGEST),
        ("-1e99999999", -LARGEST),
        ("1e" + "9" * 60, LARGEST),
        ("9" * 64, LARGEST),
        (10**4000, LARGEST),
        ("1e0000000000000003", 1000),
        ("9" * 5000, LARGEST),
        ("0" * 5000 + "7", 7),
        ("1e" + "9" * 5000, LARGEST),
        ("0." + "0" * 61 + "1", Decimal("1e-9")),
    ],
    ids=lambda value: str(value)[:16],
)
def test_amount_equals_the_value_that_kubernetes_reads(text: int | str, expected: int | Decimal) -> None:
    assert amount(text) == expected


@pytest.mark.parametrize("text", ["", ".", "1e1.5", "1e.5", "1e", "1ee3", "1.2.3", "1 Gi", "1gi", "1Gi\n", "e3", "١"])
def test_invalid_quantities_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        amount(text)


@given(st.from_regex(QUANTITY_PATTERN, fullmatch=True))
def test_quantities_that_match_the_schema_have_an_amount(text: str) -> None:
    assert 0 <= amount(text.removesuffix("\n")) <= LARGEST


@given(st.text("0123456789.+-eEkKMGTPinum", max_size=8))
def test_schema_matches_exactly_the_nonnegative_quantities(text: str) -> None:
    try:
        amount(text)
    except ValueError:
        assert not re.fullmatch(QUANTITY_PATTERN, text)
    else:
        assert bool(re.fullmatch(QUANTITY_PATTERN, text)) != text.startswith("-")
