"""What the operator's tests share."""

from __future__ import annotations

import asyncio
import copy
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import InferenceEndpoint
from stoker_operator.plan.catalogue import Catalogue

Document = dict[str, Any]

MINIMAL: Document = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "InferenceEndpoint",
    "metadata": {"name": "demo", "namespace": "default"},
    "spec": {"model": {"source": "demo://gemma-3-270m"}, "hardware": {"accelerator": "cpu"}},
}


@pytest.fixture
def document() -> Callable[..., Document]:
    """A manifest with the given parts of its spec: ``document(replicas=2)``."""

    def make(**spec: Any) -> Document:
        made = copy.deepcopy(MINIMAL)
        made["spec"] |= spec
        return made

    return make


@pytest.fixture
def endpoint(document: Callable[..., Document]) -> Callable[..., InferenceEndpoint]:
    """The same, read."""
    return lambda **spec: parse(document(**spec))


@pytest.fixture
def catalogue() -> Catalogue:
    """The built-in catalogue."""
    return Catalogue.load()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where nothing is left to do but wait, the wait is over at once, and the clock has moved."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def skip(timeout: float | None = None) -> Any:
            self.now += timeout or 0
            return select(0)

        selector.select = skip  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


@pytest.fixture
def virtual_time() -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine function in virtual time, which begins at 0."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())

    return run
