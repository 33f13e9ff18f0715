"""Prints seconds and processor seconds of a test run by folder; `--times FILE` appends those of each test to a file.

Processor seconds are those of the process that runs the test and of the processes it started that have ended, so that
compilers, servers and nested runs of pytest count. A process that outlives its test counts for the test that ends it.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", metavar="FILE", type=Path, help="write each test's seconds to FILE, a JSON object a line"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Stopwatch(), "stopwatch")
    if not hasattr(config, "workerinput"):  # not in a worker of xdist
        config.pluginmanager.register(_Totals(config), "totals")


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class _Stopwatch:
    """Adds `cpu_seconds` to each report: those since the report before."""

    def __init__(self) -> None:
        self._last: float | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        if self._last is None:
            self._last = _cpu_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _cpu_seconds()
        vars(report)["cpu_seconds"] = now - (now if self._last is None else self._last)
        self._last = now
        return report


class _Totals:
    """Adds the reports up, wherever the tests ran."""

    def __init__(self, config: pytest.Config) -> None:
        self._file: Path | None = config.getoption("--times")
        self._tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logreport(self, report: Any) -> None:
        spent = self._tests[report.nodeid]
        spent[0] += report.duration
        spent[1] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for name, (seconds, cpu_seconds) in self._tests.items():
            folders["/".join(name.partition("::")[0].split("/")[:-1][:3])].append((seconds, cpu_seconds))
        if len(self._tests) > 1:
            terminalreporter.section("where the time went")
            for folder, tests in sorted(folders.items(), key=lambda item: -sum(cpu for _, cpu in item[1])):
                seconds, cpu_seconds = (sum(column) for column in zip(*tests, strict=True))
                terminalreporter.write_line(
                    f"{seconds:7.0f} s  {cpu_seconds:7.0f} CPU s  {len(tests):6d} tests  {folder}"
                )
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as out:
                for name, (seconds, cpu_seconds) in self._tests.items():
                    row = {"test": name, "seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}
                    out.write(json.dumps(row) + "\n")
