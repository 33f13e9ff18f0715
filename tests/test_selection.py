"""All tests that only `make test-all` runs exist, so that a renamed test is not skipped everywhere."""

from __future__ import annotations

import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def test_every_excluded_name_is_a_test() -> None:
    groups = tomllib.loads((HERE / "only_in_test_all.toml").read_text())["left"]
    names = [name for group in groups for name in group["tests"]]
    assert len(set(names)) == len(names)
    assert all(group["catches"] and group["instead"] for group in groups)
    for name in names:
        file, _, test = name.partition("::")
        text = (HERE.parent / file).read_text()
        assert not test or f"def {test.partition('[')[0]}(" in text, name
