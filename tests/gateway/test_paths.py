"""Paths of stored responses."""

from __future__ import annotations

import pytest

from stoker_gateway.protocol.paths import response_id


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/a%2Fb", "a%2Fb"),
        ("/v1/responses/resp_1/input_items", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/resp_1/", None),
        ("/v1/responses/resp_1/cancel/", None),
        ("/v1/responses/resp_1/other", None),
        ("/v1/responses/", None),
        ("/v1/responses", None),
        ("/x/v1/responses/resp_1", None),
    ],
)
def test_response_id_is_found_in_the_paths_of_a_response(path: str, expected: str | None) -> None:
    assert response_id(path) == expected
