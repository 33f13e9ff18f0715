"""Shared configuration of all tests: hypothesis, selection of slow tests, virtual time.

``--slow none|drawn|all`` selects among tests marked `slow`. With `drawn`, a slow test with many cases runs a fixed part
of them, selected by the hash of each case's name. A slow test that loops itself gets its number of iterations from
`part_of`. Tests marked `slow(drawn=False)` run only with `all`: others find the same faults, less directly. Tests in
`only_in_test_all.toml` also run only with `all`; the file states what each would detect, and which test replaces it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import tomllib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from .support.virtual_time import VirtualLoop

# Some tests fork. If gRPC was loaded by another test, its fork handlers crash one such child in six (SIGSEGV, SIGABRT).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# The same examples in each run, and no time limit per example: times are noisy.
settings.register_profile("stoker", deadline=None, derandomize=True)
settings.load_profile("stoker")

#: With ``--slow drawn``, one in this many cases runs, but at least one per test.
_ONE_OF = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", metavar="SEED", help="files, and tests within them, in an order drawn by SEED")
    parser.addoption("--slow", choices=("none", "drawn", "all"), default="all", help="how many of the slow tests run")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select(config, items)
    if seed := config.getoption("--order"):
        _shuffle(items, seed)
    else:
        _longest_first(items)


def _shuffle(items: list[pytest.Item], seed: str) -> None:
    """Shuffle files, but keep a file's tests together, since they share models and servers."""
    draw = random.Random(seed)
    files: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    groups = list(files.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    items[:] = [item for group in groups for item in group]


def _longest_first(items: list[pytest.Item]) -> None:
    """Sort files so that workers finish together (``--dist loadfile --no-loadscope-reorder`` takes them in this order).

    Files with tests marked `slow` or `timeout` come first, by ascending number of tests; then the others, by descending
    number.
    """
    files: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)

    def sort_key(path: Any) -> tuple[bool, int]:
        file_items = files[path]
        takes_long = any(item.get_closest_marker(marker) for item in file_items for marker in ("slow", "timeout"))
        return not takes_long, len(file_items) if takes_long else -len(file_items)

    items[:] = [item for path in sorted(files, key=sort_key) for item in files[path]]


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = config.getoption("--slow")
    if slow == "all":
        return
    left_out = {item for item in items if _is_only_in_test_all(item.nodeid)}
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item not in left_out and (marker := item.get_closest_marker("slow")) is not None:
            left_out.add(item)
            if marker.kwargs.get("drawn", True):
                cases[item.nodeid.partition("[")[0]].append(item)
    if slow == "drawn":
        left_out -= {item for items in cases.values() for item in _drawn(items)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


_ONLY_IN_TEST_ALL = {
    name
    for group in tomllib.loads(Path(__file__).with_name("only_in_test_all.toml").read_text())["left"]
    for name in group["tests"]
}


def _is_only_in_test_all(nodeid: str) -> bool:
    """Return whether the list names the file, the test or the case."""
    test = nodeid.partition("[")[0]
    return not _ONLY_IN_TEST_ALL.isdisjoint((nodeid, test, test.partition("::")[0]))


def _drawn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return a fixed part of a test's cases."""
    by_hash = sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    return by_hash[: max(1, len(items) // _ONE_OF)]


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Remove the stream handlers that a test added to the root logger, and restore its level.

    A command that runs in this process logs to the test's standard error, which is closed afterwards: each later log
    line would print a traceback.
    """
    root = logging.getLogger()
    handlers, level = set(root.handlers), root.level
    yield
    for handler in set(root.handlers) - handlers:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
            root.setLevel(level)


@pytest.fixture
def restored_root_logger() -> Iterator[None]:
    """Restore the root logger."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def part_of(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """Return how many of `n` iterations a slow test runs."""
    return lambda whole: whole // _ONE_OF if pytestconfig.getoption("--slow") == "drawn" else whole


@pytest.fixture
def virtual_time() -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Run a coroutine function in virtual time, which starts at 0."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())

    return run
