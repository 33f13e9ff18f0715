"""Read-only client of the API server.

Objects are plain dictionaries in the API server's JSON form. Calls block.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final

import urllib3
from kubernetes import client, config

from stoker_gateway.errors import GatewayError

Object = dict[str, Any]

_CONNECT_S: Final = 5
_READ_S: Final = 30
#: TCP keepalive: an idle connection whose other end has disappeared fails within 25 s.
_KEEP_ALIVE: Final = [
    *urllib3.connection.HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class ApiError(Exception):
    """The API server returned an error, an invalid response, or none.

    Args:
        status: the error's HTTP status code; 0 if it has none.
        retry_after_s: Retry-After in seconds; 0 if it is absent or unusable.
    """

    def __init__(self, status: int, message: str, retry_after_s: float = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Api:
    """Client of an API server. Thread-safe.

    Args:
        api: client with the server's address and credentials.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    @classmethod
    def connect(cls) -> Api:
        """Return a client of the kubeconfig's cluster or, without a kubeconfig, of the cluster of this pod.

        Raises:
            GatewayError: no usable configuration was found.
        """
        configuration = client.Configuration()
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            configuration.proxy = None  # in a pod, HTTPS_PROXY is meant for destinations outside of the cluster
        try:
            with contextlib.redirect_stdout(None):  # `load_config` prints if there is no kubeconfig
                config.load_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (config.ConfigException, OSError) as error:
            raise GatewayError(f"no cluster: {error}; set KUBECONFIG, or run in a pod with a service account") from None
        configuration.retries = urllib3.Retry(1, respect_retry_after_header=False)
        configuration.socket_options = _KEEP_ALIVE
        return cls(client.ApiClient(configuration))

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        """Return the object at a path.

        Raises:
            ApiError: the request failed, or the response is not a JSON object.
        """
        with self._response(path, query or {}, _READ_S) as answer:
            try:
                found = json.loads(answer.data)
            except ValueError:
                found = None
        if not isinstance(found, dict):
            raise ApiError(0, f"the API server's answer to GET {path} is not a JSON object")
        return found

    @contextlib.contextmanager
    def lines(self, path: str, query: Mapping[str, str], silent_s: float) -> Iterator[Iterator[Object]]:
        """Context manager: open a watch, and yield an iterator of its events.

        Args:
            silent_s: maximum time without data, in seconds.

        Raises:
            ApiError: the watch cannot be opened or read.
        """
        with self._response(path, query, silent_s) as answer:
            yield _objects(answer)

    @contextlib.contextmanager
    def _response(self, path: str, query: Mapping[str, str], silent_s: float) -> Iterator[urllib3.BaseHTTPResponse]:
        request = self._api.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        answer: urllib3.BaseHTTPResponse | None = None
        try:
            answer = self._api.call_api(*request, _request_timeout=(_CONNECT_S, silent_s)).response
            if not 200 <= answer.status < 300:
                message = _message(answer.data) or f"{answer.status} {answer.reason}"
                raise ApiError(answer.status, message, _retry_after_s(answer.headers.get("Retry-After")))
            yield answer
        except client.ApiException as error:
            raise ApiError(error.status or 0, _message(error.body) or str(error.reason)) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, f"no answer from the API server: {error}") from None
        finally:
            if answer is not None:
                answer.close()


def _objects(answer: urllib3.BaseHTTPResponse) -> Iterator[Object]:
    buffer = b""
    for part in answer.stream(1 << 16, decode_content=True):
        *lines, buffer = (buffer + part).split(b"\n")
        for line in filter(None, lines):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                raise ApiError(0, "the API server sent an invalid watch event")
            yield event


def _message(body: str | bytes | None) -> str:
    """Return the message of a Status object; empty if there is none."""
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, TypeError, KeyError):
        return ""


def _retry_after_s(header: str | None) -> float:
    return float(header) if header and header.isascii() and header.isdecimal() and len(header) < 6 else 0.0
