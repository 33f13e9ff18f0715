"""The selection of tests for a changed file by `make check`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

find: Any = runpy.run_path(str(Path(__file__).with_name("changed.py")))["tests_for"]


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("engine/stoker_engine/sched/scheduler.py", ["tests/engine/sched"]),
        ("engine/stoker_engine/kernels/cpu/csrc/common/simd.h", ["tests/engine/kernels"]),
        ("engine/stoker_engine/llm.py", ["tests/engine/test_llm.py"]),
        ("operator/stoker_operator/reconcile/status.py", ["tests/operator/reconcile"]),
        ("gateway/stoker_gateway/usage/tokens.py", ["tests/gateway/usage"]),
        ("tests/engine/test_llm.py", ["tests/engine/test_llm.py"]),
        ("tests/engine/sched/fake_model.py", ["tests/engine/sched"]),
        ("tests/conftest.py", []),
        ("charts/stoker/values.yaml", ["tests/operator"]),
        ("docs/design/ci.md", ["tests/test_docs.py"]),
        ("Makefile", []),
    ],
)
def test_tests_of_a_changed_file_are_found(file: str, tests: list[str]) -> None:
    assert find(file) == tests
