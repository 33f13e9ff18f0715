"""URLs of servers in command lines."""

from __future__ import annotations

import pytest

from stoker_common.errors import ArgumentError
from stoker_engine.cli.server_url import api_url, root_url


@pytest.mark.parametrize(
    ("url", "api", "root"),
    [
        ("http://host:8000", "http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/", "http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000/v1", "http://host:8000"),
        ("http://[::1]:8000/v1/", "http://[::1]:8000/v1", "http://[::1]:8000"),
        ("https://host/llm/v1", "https://host/llm/v1", "https://host/llm"),
        ("https://host/v1beta/openai", "https://host/v1beta/openai", "https://host/v1beta/openai"),
    ],
)
def test_urls_work_with_and_without_v1(url: str, api: str, root: str) -> None:
    assert (api_url("--url", url), root_url("--url", url)) == (api, root)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "host", "", "ftp://host", "http://", "http://host:port", "http:///v1"]
)
def test_invalid_urls_are_refused(url: str) -> None:
    for check in (api_url, root_url):
        with pytest.raises(ArgumentError, match=r"^--url: .* is not a URL"):
            check("--url", url)
