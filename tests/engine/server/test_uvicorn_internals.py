"""The used internals of uvicorn are those listed in `uvicorn_internals`, and are unchanged.

Their behaviour is tested by what depends on it: shutdown in test_stopping.py, limits in test_slow_clients.py and
test_hostile_http.py.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.http import http_protocol, http_server, uvicorn_internals

from .test_slow_clients import Connected


def class_of(module: object, name: str) -> ast.ClassDef:
    tree = ast.parse(Path(inspect.getfile(module)).read_text())  # type: ignore[arg-type]
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def names_in(node: ast.ClassDef, *of: str) -> Iterator[str]:
    """Yield attributes of ``self.<of>`` that a class uses; also its methods if `of` is empty."""
    prefix = ast.unparse(ast.parse(".".join(("self", *of))))
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == prefix:
            yield each.attr
        elif not of and isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name


def public(name: str) -> bool:
    return not name.startswith("__") and not hasattr(asyncio.Protocol, name)


def test_internals_used_by_connections_exist_and_are_listed(
    virtual_time: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
) -> None:
    async def run() -> None:
        connected = Connected()
        base = H11Protocol(connected.protocol.config, ServerState(), {})
        own_names = set(filter(public, names_in(class_of(http_protocol, "Connection"))))
        assert own_names & set(dir(base)) == set(uvicorn_internals.CONNECTION)
        await connected.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        used = set(names_in(class_of(http_protocol, "Connection"), "cycle"))
        assert isinstance(connected.protocol.cycle, RequestResponseCycle)
        assert used & set(dir(connected.protocol.cycle)) == used == set(uvicorn_internals.CYCLE)
        connected.protocol.connection_lost(None)
        await asyncio.sleep(0)

    virtual_time(run)


def test_internals_used_by_the_server_exist_and_are_listed() -> None:
    config = uvicorn.Config(lambda: None, log_config=None)
    own_names = set(filter(public, names_in(class_of(http_server, "Server"))))
    assert own_names & set(dir(uvicorn.Server(config))) == set(uvicorn_internals.SERVER)


def test_the_shared_server_state_has_the_expected_types() -> None:
    state = ServerState()
    assert isinstance(state.connections, set) and isinstance(state.default_headers, list)


def test_overridden_methods_keep_their_signatures() -> None:
    for own_names, base in (
        (http_server.Server, uvicorn.Server),
        (http_protocol.http_protocol(FrontendArgs()), H11Protocol),
    ):
        for name, member in vars(base).items():
            if name in vars(own_names) and name != "__init__" and inspect.isfunction(member):
                mine = inspect.signature(vars(own_names)[name])
                assert list(mine.parameters)[: len(inspect.signature(member).parameters)] == list(
                    inspect.signature(member).parameters
                ), name
                assert inspect.iscoroutinefunction(vars(own_names)[name]) == inspect.iscoroutinefunction(member), name
