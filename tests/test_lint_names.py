"""What the linter of names finds, and what it ignores."""

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
        ("# The stream is begun anew.", True),  # an example of a finding
        ("x-stoker-not-begun", False),
        ("class LineupOfOthers: ...", False),
        ("The stream has started.", False),
    ],
)
def test_retired_names_and_archaic_words_are_found(line: str, found: bool) -> None:
    assert bool(LINT["findings"]("a.py", line)) == found


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("told = 1", [1]),
        ("x = 1\n_told, (a, *here) = x", [2, 2]),
        ("def f(x, *, most=None): ...", [1]),
        ("def f(*its, **whose): ...", [1, 1]),
        ("f = lambda place: place", [1]),
        ("def place(): ...\nasync def _who(): ...", [1, 2]),
        ("class A:\n    said: str = ''\n    def f(self):\n        self._wanted = 1", [2, 4]),
        ("[x for places in y]", [1]),
        ("for here in x: ...\nwith x as told: ...", [1, 2]),
        ("try: ...\nexcept OSError as said: ...", [2]),
        ("match x:\n    case [told, *most] | {'a': told, 'b': most}: ...", [2, 2, 2, 2]),
        ("import x as here", [1]),
        ("(most := 1)", [1]),
        ("told_by = most_bytes = placed = 1", []),
        ("print(told, x.most, f(place=1), 'said')", []),  # names that are only used here
        ("class Place: ...", []),
    ],
)
def test_vague_names_are_found(code: str, lines: list[int]) -> None:
    assert [int(found.split(":")[1]) for found in LINT["vague"]("a.py", code)] == lines


def test_retired_names_are_in_the_glossary() -> None:
    glossary = (Path(__file__).parents[1] / "docs/reference/glossary.md").read_text()
    classes = [name for name in LINT["RETIRED"] if name[0].isupper() and name != "CopyMetrics"]
    assert len(classes) > 20
    assert [name for name in classes if f"`{name}`" not in glossary] == []
