"""Runs a tutorial: what it shows is done, in the order in which it is shown, and prints what it says.

    python docs/tutorials/tutorial.py docs/tutorials/03-tensor-and-data-parallel.md

    ```yaml      # its first line, "# FILE.yaml", says where it is saved
    ```sh        run by bash; "exit=2" behind sh says that it fails so
    ```output    lines that the block before prints, in this order; "…" stands for anything
    ```console   shown only

A comment at the top says what it needs: nothing, an API server with the operator (apiserver), or a cluster whose pods
run (cluster). Everything happens in a scratch folder in which charts/ and examples/ lie.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)[ ]*(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of a tutorial.

    Attributes:
        line: where it begins.
        kind: yaml, sh, output or console.
        text: what is in it.
        code: the exit code that an sh block ends with.
    """

    line: int
    kind: str
    text: str
    code: int = 0


def needs(tutorial: Path) -> str:
    """What the tutorial needs: nothing, apiserver or cluster."""
    found = re.match(r"<!-- needs: (nothing|apiserver|cluster) -->", tutorial.read_text())
    assert found, f"{tutorial} does not say what it needs"
    return found[1]


def tutorials(need: str) -> list[Path]:
    """The tutorials that need this."""
    return [each for each in sorted(Path(__file__).parent.glob("[0-9]*.md")) if needs(each) == need]


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a tutorial."""
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        assert match[1] in ("yaml", "sh", "output", "console"), f"line {line}: what is {match[1]}?"
        code = int(match[2].removeprefix("exit=")) if match[2] else 0
        yield Block(line, match[1], match[3], code)


def run(tutorial: Path, environment: Mapping[str, str]) -> None:
    """Runs a tutorial.

    Raises:
        AssertionError: something ends otherwise, or prints something else, than the tutorial says.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for folder in ("charts", "examples"):
            (Path(scratch) / folder).symlink_to(ROOT / folder)
        printed = ""
        for block in blocks(tutorial.read_text()):
            where = f"{tutorial.name}:{block.line}"
            if block.kind == "yaml":
                name = re.match(r"# (\S+\.yaml)\n", block.text)
                if name:
                    (Path(scratch) / name[1]).write_text(block.text)
            elif block.kind == "sh":
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", block.text],
                    cwd=scratch,
                    env={**os.environ, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                )
                printed = done.stdout
                assert done.returncode == block.code, f"{where} ended with {done.returncode}:\n{printed}"
            elif block.kind == "output":
                missing = lacks(printed, block.text)
                assert not missing, f"{where}: {missing!r} is not in\n{printed}"


def lacks(printed: str, expected: str) -> str:
    """The first line of `expected` that is not in `printed`, below those before it; spaces count as one."""
    lines = iter(printed.splitlines())
    for line in filter(str.strip, expected.splitlines()):
        pattern = re.compile(r".*".join(re.escape(" ".join(part.split())) for part in line.split("…")))
        if not any(pattern.search(" ".join(each.split())) for each in lines):
            return line
    return ""


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name), {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
        sys.stdout.write(f"{name}: it is so\n")
