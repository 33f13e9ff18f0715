"""Event streams and JSON Lines are split only at line feeds.

``str.splitlines`` and httpx's ``iter_lines`` also split at U+2028, U+2029, U+0085 and others, which JSON may contain.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Folders of programs. Elsewhere, text other than JSON may be split at any line boundary.
PROGRAMS = ("engine/", "operator/", "gateway/", "cli/", "images/")


def wrong(source: str, *, program: bool) -> list[int]:
    """Return the line numbers of `source` that split text elsewhere than at line feeds.

    Args:
        program: check all text, not only JSON.
    """
    return sorted(
        node.lineno
        for statement in ast.walk(ast.parse(source))
        if isinstance(statement, ast.stmt)
        for node in _own_nodes(statement)
        if isinstance(node, ast.Attribute)
        and (
            node.attr in ("iter_lines", "aiter_lines")
            or (node.attr == "splitlines" and (program or _reads_json(statement)) and not _may(node))
        )
    )


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without nested statements."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield from ast.walk(child)


def _reads_json(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "json" for node in _own_nodes(statement))


def _may(node: ast.Attribute) -> bool:
    """Return whether the call splits bytes, only at line feeds and carriage returns, or a file of /proc."""
    receiver = ast.unparse(node.value)
    return "read_bytes" in receiver or "/proc/" in receiver


def test_json_and_event_streams_are_split_only_at_line_feeds() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {
        f"{name}:{line}"
        for name in listed.split("\n")
        if (ROOT / name).is_file()
        for line in wrong((ROOT / name).read_text(encoding="utf-8"), program=name.startswith(PROGRAMS))
    }
    assert not found, "write .split('\\n'), or use stoker_engine.cli.lines"


def test_splits_at_other_line_boundaries_are_found() -> None:
    assert wrong("for line in answer.iter_lines():\n    pass\n", program=False) == [1]
    assert wrong("x = [json.loads(line) for line in text.splitlines()]", program=False) == [1]
    assert wrong("x = text.splitlines()", program=True) == [1]
    assert wrong("x = text.splitlines()", program=False) == []
    assert wrong("x = Path('/proc/cpuinfo').read_text().splitlines()", program=True) == []
    assert wrong("x = map(json.loads, path.read_bytes().splitlines())", program=True) == []
