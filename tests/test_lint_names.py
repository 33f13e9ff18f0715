"""What the check of names finds, and what it leaves."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LINT = runpy.run_path(str(Path(__file__).with_name("lint_names.py")))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from stoker_engine.children.death import Died", True),
        ("class Lineup:", True),
        ("# The stream is begun anew.", True),  # an example of what is not to be written
        ("x-stoker-not-begun", False),
        ("class LineupOfOthers: ...", False),
        ("The stream has started.", False),
    ],
)
def test_a_line(line: str, found: bool) -> None:
    assert bool(LINT["findings"]("a.py", line)) == found


def test_the_names_of_the_glossary_are_retired() -> None:
    glossary = (Path(__file__).parents[1] / "docs/reference/glossary.md").read_text()
    classes = [name for name in LINT["RETIRED"] if name[0].isupper() and name != "CopyMetrics"]
    assert len(classes) > 20
    assert [name for name in classes if f"`{name}`" not in glossary] == []
