"""What all tests share: hypothesis' settings, how many of the slow tests run, virtual time.

``--slow none|drawn|all``: slow tests are those that `slow` marks. Of a slow test with many cases, `drawn` keeps a fixed
part of the cases, drawn by the hash of each one's name: the same in every run, and unmoved by a case that is added. A
slow test that counts by itself asks `part_of` how much to do. What `slow(drawn=False)` marks is left out there: what it
alone would find others find, less directly. What `only_in_test_all.toml` names runs with `all` alone; it says what each
of those would catch, and what runs in its place.
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

# Some tests fork. Where gRPC was loaded by another, its handlers of forks end one such child in six (SIGSEGV, SIGABRT).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# The same examples in each run, and no limit on the time of one: time is noisy.
settings.register_profile("stoker", deadline=None, derandomize=True)
settings.load_profile("stoker")

#: Of so many cases one is drawn, and of a few one too.
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
    """A file's tests stay together, since they share models and servers."""
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
    """Workers take files in this order (``--dist loadfile --no-loadscope-reorder``), to end together: files with
    tests that are slow or may take long come first, those of few before those of many; of others those of many."""
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
    """Whether the file, the test or the case is named there."""
    test = nodeid.partition("[")[0]
    return not _ONLY_IN_TEST_ALL.isdisjoint((nodeid, test, test.partition("::")[0]))


def _drawn(items: list[pytest.Item]) -> list[pytest.Item]:
    """A fixed part of a test's cases."""
    by_hash = sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    return by_hash[: max(1, len(items) // _ONE_OF)]


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that a test runs in this process sends the log to that test's standard error, which is closed after it:
    each later line would become a traceback."""
    root = logging.getLogger()
    handlers, level = set(root.handlers), root.level
    yield
    for handler in set(root.handlers) - handlers:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
            root.setLevel(level)


@pytest.fixture
def restored_root_logger() -> Iterator[None]:
    """The root logger stays as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def part_of(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """How many of so many a slow test is to do."""
    return lambda whole: whole // _ONE_OF if pytestconfig.getoption("--slow") == "drawn" else whole


@pytest.fixture
def virtual_time() -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine function in virtual time, which begins at 0."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())

    return run
