"""The server's flags."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_common.errors import ArgumentError
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--api-key", "a", "b", "--port=1"],
        ["--allowed-origins", "https://a", "https://b", "--allow-credentials"],
        ["--max-num-queued-reqs=5", "--max-num-queued-tokens=8K", "--max-request-bytes=1K"],
        ["--ssl-certfile=a", "--ssl-keyfile=b", "--ssl-ca-certs=c", "--ssl-cert-reqs=2"],
        ["--shutdown-grace=0", "--shutdown-timeout=1.5", "--step-timeout=0.5", "--log-format=json"],
        ['--default-chat-template-kwargs={"a": 1}', "--root-path=/a/b", "--no-enable-prompt-tokens-details"],
    ],
)
def test_frontend_flags_survive_the_command_line(words: list[str]) -> None:
    args = ServeArgs.from_argv(["m", *words])
    assert ServeArgs.from_argv(args.to_argv()) == args


def test_list_flags_accept_vllms_json_spelling() -> None:
    args = ServeArgs.from_argv(["m", "--allowed-origins", '["https://a", "https://b"]', "--allowed-methods", '["GET"]'])
    assert args.frontend.allowed_origins == ("https://a", "https://b")
    assert args.frontend.allowed_methods == ("GET",)


def test_repr_hides_api_keys() -> None:
    assert "sesame" not in repr(FrontendArgs(api_key=("sesame",)))


@pytest.mark.parametrize(
    "fields, flag",
    [
        ({"port": 65536}, "--port"),
        ({"root_path": "a"}, "--root-path"),
        ({"root_path": "/a/"}, "--root-path"),
        ({"log_format": "xml"}, "--log-format"),
        ({"uvicorn_log_level": "loud"}, "--uvicorn-log-level"),
        ({"ssl_keyfile": "a"}, "--ssl-certfile"),
        ({"ssl_certfile": "a", "ssl_cert_reqs": 3}, "--ssl-cert-reqs"),
        ({"ssl_certfile": "a", "ssl_cert_reqs": 1}, "--ssl-ca-certs"),
        ({"max_num_queued_reqs": -1}, "--max-num-queued-reqs"),
        ({"max_request_bytes": 0}, "--max-request-bytes"),
        ({"request_header_timeout": -1.0}, "--request-header-timeout"),
        ({"request_body_timeout": float("nan")}, "--request-body-timeout"),
        ({"min_request_body_data_rate": -1}, "--min-request-body-data-rate"),
        ({"send_timeout": float("inf")}, "--send-timeout"),
        ({"shutdown_grace": -1.0}, "--shutdown-grace"),
        ({"shutdown_timeout": float("inf")}, "--shutdown-timeout"),
        ({"step_timeout": 0.0}, "--step-timeout"),
        ({"step_timeout": float("nan")}, "--step-timeout"),
        ({"api_key": ("",)}, "--api-key"),
        ({"api_key": ("a ",)}, "--api-key"),
        ({"default_chat_template_kwargs": "{"}, "--default-chat-template-kwargs"),
        ({"default_chat_template_kwargs": "[]"}, "--default-chat-template-kwargs"),
        ({"default_chat_template_kwargs": "[" * 5000}, "--default-chat-template-kwargs"),
        ({"allowed_methods": ("[" * 5000,)}, "--allowed-methods"),
        ({"allowed_origins": ("[1]",)}, "--allowed-origins"),
        ({"allowed_headers": ("[",)}, "--allowed-headers"),
    ],
)
def test_error_about_a_value_names_its_flag(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(ArgumentError) as error:
        FrontendArgs(**fields)
    assert error.value.argument == flag
