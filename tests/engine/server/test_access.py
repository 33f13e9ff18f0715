"""Access control: keys, limits, origins, and served names."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from pathlib import Path

import pytest
from httpx import Response
from starlette.testclient import TestClient

from stoker_common.errors import ArgumentError
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.server.middleware.api_keys import APIKeys

from .conftest import FakeEngine, MakeClient
from .test_errors import error_of

BODY = {"prompt": "a"}


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_all_paths_but_probes_require_a_key(make_client: MakeClient) -> None:
    client = make_client(api_key=("one", "two"))
    for path in ("/health", "/ready", "/live", "/ping", "/version", "/metrics"):
        assert client.get(path).status_code == 200
    for path in ("/v1/models", "/openapi.json", "/load", "/nowhere", "/v1/completions", "/health/", "//health"):
        response = client.get(path)
        error = error_of(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert client.get("/v1/models", headers=_bearer("one")).status_code == 200
    assert client.post("/v1/completions", json=BODY, headers=_bearer("two")).status_code == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer onе", "Bearer \xff"]
)
def test_other_authorization_headers_are_refused(make_client: MakeClient, engine: FakeEngine, value: str) -> None:
    headers = {"authorization": value.encode()}
    assert make_client(api_key=("one",)).post("/v1/completions", json=BODY, headers=headers).status_code == 401
    assert not engine.requests_seen


def test_a_key_is_checked_before_the_body_is_read(make_client: MakeClient) -> None:
    client = make_client(api_key=("one",), max_request_bytes=10)
    assert client.post("/v1/completions", content=b"x" * 100).status_code == 401


def test_keys_in_a_file_are_reread_when_it_changes(make_client: MakeClient, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\n  second  \n")
    client = make_client(api_key_file=str(file))

    def status(key: str) -> int:
        return client.get("/v1/models", headers=_bearer(key)).status_code

    assert [status(key) for key in ("first", "second", "third")] == [200, 200, 401]
    new = tmp_path / "new"
    new.write_text("third\n")
    new.replace(file)
    assert [status(key) for key in ("first", "second", "third")] == [401, 401, 200]
    file.unlink()
    assert status("third") == 200, "a file that is gone leaves the keys as they were"
    file.write_text("")
    assert status("third") == 401, "an empty file permits no key"
    assert status("") == 401


def test_keys_of_a_mounted_secret_are_reread_when_it_changes(
    make_client: MakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Laid out and changed as by the kubelet: files are links into a hidden folder, which is replaced as a whole."""

    def mount(version: str, **files: str) -> None:
        folder = tmp_path / f"..{version}"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
            link = tmp_path / name
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}")
        swap = tmp_path / "..data_tmp"
        swap.symlink_to(folder.name)
        swap.replace(tmp_path / "..data")
        for link in tmp_path.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()

    mount("1", alice="a-1\na-2\n", bob="b-1")
    client = make_client(api_key_file=str(tmp_path))

    def status(key: str) -> int:
        return client.get("/v1/models", headers=_bearer(key)).status_code

    assert [status(key) for key in ("a-1", "a-2", "b-1", "c-1", "")] == [200, 200, 200, 401, 401]
    mount("2", bob="b-2", carol="c-1")
    assert [status(key) for key in ("a-1", "a-2", "b-1", "b-2", "c-1")] == [401, 401, 401, 200, 200]
    mount("3")
    assert [status(key) for key in ("b-2", "c-1", "")] == [401, 401, 401]
    assert "holds no API key; requests that need one are refused" in caplog.text


def test_an_empty_secret_leaves_the_keys_of_the_command_line(
    make_client: MakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(api_key_file=str(tmp_path), api_key=("fixed",))
    assert client.get("/v1/models", headers=_bearer("fixed")).status_code == 200
    assert "holds no API key; only the keys of --api-key are valid" in caplog.text


def test_an_empty_secret_refuses_all_requests_until_it_has_keys(make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client(api_key_file=str(tmp_path))
    assert client.get("/v1/models", headers=_bearer("a")).status_code == 401
    (tmp_path / "key").write_text("a")
    assert client.get("/v1/models", headers=_bearer("a")).status_code == 200


def test_keys_come_from_the_environment_if_no_flag_is_given() -> None:
    environment = {"STOKER_API_KEY": "a", "VLLM_API_KEY": "b"}
    keys = APIKeys.from_args(FrontendArgs(), environment)
    keys.check(b"Bearer a")
    keys.check(b"bearer b")
    assert not APIKeys.from_args(FrontendArgs(), {"VLLM_API_KEY": ""}).are_needed
    with pytest.raises(Exception, match="API key"):
        APIKeys.from_args(FrontendArgs(api_key=("c",)), environment).check(b"Bearer a")


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_file_without_keys_is_refused_at_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ArgumentError, match="--api-key-file"):
        APIKeys((), file)


def test_keys_are_never_logged(make_client: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = make_client(api_key=("sesame",), enable_log_requests=True)
    client.post("/v1/completions", json=BODY, headers=_bearer("sesame"))
    client.post("/v1/completions", json=BODY, headers=_bearer("sesame?"))
    assert "sesame" not in caplog.text
    assert "sesame" not in repr(ServeArgs.from_argv(["m", "--api-key", "sesame"]))


def test_web_pages_may_call_from_allowed_origins(make_client: MakeClient) -> None:
    client = make_client(allowed_origins=("https://a.example",), api_key=("k",))
    preflight_headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    preflight = client.options(
        "/v1/completions", headers={**preflight_headers, "access-control-request-headers": "authorization"}
    )
    assert preflight.status_code == 200, "browsers ask this without credentials"
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    answer = client.post("/v1/completions", json=BODY, headers={"origin": "https://a.example", **_bearer("k")})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert (
        client.options("/v1/completions", headers={**preflight_headers, "origin": "https://b.example"}).status_code
        == 400
    )
    refused = client.post("/v1/completions", json=BODY, headers={"origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example", "so that the page can read it"


def test_cors_headers_are_not_sent_without_allowed_origins(client: TestClient) -> None:
    assert "access-control-allow-origin" not in client.get("/version", headers={"origin": "https://a.example"}).headers


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_paths_work_with_and_without_a_proxys_prefix(make_client: MakeClient, prefix: str) -> None:
    """For proxies that strip the prefix and proxies that do not."""
    client = make_client(root_path="/llm", api_key=("k",))
    assert client.get(f"{prefix}/health").status_code == 200
    assert client.get(f"{prefix}/v1/models").status_code == 401
    assert client.get(f"{prefix}/v1/models", headers=_bearer("k")).status_code == 200
    assert client.get("/other/health").status_code == 401


def test_request_ids_come_from_the_header_or_the_body(client: TestClient, engine: FakeEngine) -> None:
    answer = client.post("/v1/completions", json=BODY, headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "cmpl-abc-1"
    named = client.post("/v1/completions", json={**BODY, "request_id": "mine", "stream": True})
    assert named.headers["x-request-id"] == "mine"
    assert '"id":"cmpl-mine"' in named.text
    both = client.post("/v1/completions", json={**BODY, "request_id": "mine"}, headers={"x-request-id": "theirs"})
    assert both.json()["id"] == "cmpl-theirs"
    assert len(set(engine.names)) == 3
    for odd in ("", "two words", "é", "x" * 129):
        made = client.get("/nowhere", headers={"x-request-id": odd.encode()}).headers["x-request-id"]
        assert len(made) == 32


def test_requests_with_the_same_id_do_not_collide(client: TestClient, engine: FakeEngine) -> None:
    for _ in range(2):
        assert client.post("/v1/completions", json=BODY, headers={"x-request-id": "same"}).status_code == 200
    assert len(set(engine.names)) == 2


@pytest.mark.parametrize("has_length", [True, False])
def test_bodies_that_are_too_large_are_refused(make_client: MakeClient, has_length: bool) -> None:
    client = make_client(max_request_bytes=1000)
    body = b'{"prompt": "' + b"a" * 1000 + b'"}'
    content = body if has_length else iter([body[:600], body[600:]])
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert "1000 bytes" in error_of(response, 413)["message"]
    assert client.post("/v1/completions", json=BODY).status_code == 200


def test_the_openapi_schema_may_be_hidden(make_client: MakeClient, client: TestClient) -> None:
    assert client.get("/openapi.json").status_code == 200
    assert make_client(disable_fastapi_docs=True).get("/openapi.json").status_code == 404


def test_compressed_bodies_are_decoded_within_the_limit_or_refused(make_client: MakeClient) -> None:
    client = make_client(max_request_bytes=5 << 20)
    body = json.dumps(BODY).encode()

    def post(content: bytes, encoding: str) -> Response:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        return client.post("/v1/completions", content=content, headers=headers)

    for encoding, content in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body)), ("identity", body)):
        assert post(content, encoding).status_code == 200
    long = json.dumps({**BODY, "prompt": " " * (3 << 20)}).encode()
    assert post(gzip.compress(long), "gzip").status_code == post(long, "identity").status_code != 413
    error_of(post(gzip.compress(b" " * (64 << 20)), "gzip"), 413)
    for encoding in ("zstd", "br", "gzip, gzip"):
        assert "Content-Encoding" in error_of(post(body, encoding), 415)["message"]
    for broken in (body, gzip.compress(body)[:-9], b""):
        error_of(post(broken, "gzip"), 400)
