"""Token usage in responses, in all formats."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker_gateway.usage.tokens import Tokens, estimated, reported

COUNTS = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
#: Malformed values, possible from hostile servers.
ODD = st.one_of(
    st.none(), st.booleans(), st.text(max_size=5), st.just(1e300), st.integers(-(1 << 62), -1),
    st.integers(1 << 31, 1 << 62), st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.none()),
)  # fmt: skip
NAMES = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "input_tokens",
    "output_tokens",
    "prompt_tokens_details",
)


def metadata(**objects: Any) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in objects.items()}


@given(COUNTS)
def test_usage_of_each_api_is_read(counts: tuple[int, int, int, int]) -> None:
    new, cached, created, output = counts
    openai = {"completion_tokens": output, "prompt_tokens": new + cached, "prompt_tokens_details": None}
    expected = Tokens(new + cached, cached, output)
    assert reported(metadata(usage=openai)) == Tokens(new + cached, 0, output)
    assert reported(metadata(usage=openai | {"prompt_tokens_details": {"cached_tokens": cached}})) == expected
    responses = {
        "input_tokens": new + cached,
        "output_tokens": output,
        "input_tokens_details": {"cached_tokens": cached},
    }
    assert reported(metadata(response=responses)) == reported(metadata(usage=responses)) == expected
    first = {"input_tokens": new, "cache_read_input_tokens": cached, "cache_creation_input_tokens": created}
    whole = Tokens(new + cached + created, cached, output)
    assert reported(metadata(usage=first | {"output_tokens": output})) == whole
    assert reported(metadata(message=first | {"output_tokens": 1}, usage={"output_tokens": output})) == whole
    running_usage = {"prompt_tokens": new + cached, "completion_tokens": output, "cached_tokens": cached}
    one_of_many = {"prompt_tokens": 1, "completion_tokens": 1}
    assert reported(metadata(stoker_usage=running_usage, usage=one_of_many)) == expected


@given(st.dictionaries(st.sampled_from(NAMES), ODD), st.text(max_size=20))
def test_malformed_usage_is_ignored(usage: dict[str, Any], text: str) -> None:
    assert reported({}) is None
    for objects in (metadata(usage=usage), {"usage": text}, {"usage": "[" * 5000}, {"stoker_usage": 3.0}):
        assert reported(objects) is None
    tokens = reported(metadata(usage=usage | {"prompt_tokens": 5}))
    assert tokens == Tokens(5, 0, 0)


def test_estimate_grows_with_the_sizes_and_is_marked_as_one() -> None:
    assert estimated(4001, 2200, streamed=True) == Tokens(1001, 0, 10, estimated=True)
    assert estimated(0, 2200, streamed=False) == Tokens(0, 0, 550, estimated=True)
