"""Files and folders that the documentation names exist. A file that is yet to come is written in italics."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("images", "benchmarks")),
]

#: `folder/`, `folder/file.yaml` or `file.py`: code in a text that can only be a path of ours.
PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|yaml|json|cpp|h|sh|svg|toml))?|[\w-]+\.py)`")
#: What the architecture says must never exist.
FORBIDDEN = "operator/__init__.py"
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@cache
def ends_of_paths() -> frozenset[str]:
    """All files and folders, and all ends of their paths; folders end with a slash."""
    found = set()
    for top in (*ROOT.glob("*"), *ROOT.glob(".ci")):
        if top.name == "node_modules" or (top.name.startswith(".") and top.name != ".ci"):
            continue
        for path in (top, *(top.rglob("*") if top.is_dir() else ())):
            parts = path.relative_to(ROOT).parts
            slash = "/" if path.is_dir() else ""
            found.update("/".join(parts[start:]) + slash for start in range(len(parts)))
    return frozenset(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_what_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = {name for name in PATH.findall(text) if name.removeprefix("./") not in ends_of_paths()} - {FORBIDDEN}
    missing |= {link for link in LINK.findall(text) if not (document.parent / link).exists()}
    assert not missing


def test_operator_is_no_package() -> None:
    assert not (ROOT / FORBIDDEN).exists()


def test_the_architecture_names_many() -> None:
    """The pattern finds what the page is full of."""
    assert len(set(PATH.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))) > 50
