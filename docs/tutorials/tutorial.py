"""Run a tutorial: execute its blocks in order, and compare their output with the text.

    python docs/tutorials/tutorial.py docs/tutorials/03-tensor-and-data-parallel.md

    ```yaml      # saved as FILE.yaml if its first line is "# FILE.yaml"
    ```sh        run by bash; "exit=2" after sh is the expected exit code
    ```output    lines that the previous block prints, in this order; "…" matches any text
    ```console   not run

A comment at the top names the requirement: nothing, an API server with the operator (apiserver), or a cluster that runs
pods (cluster). Blocks run in a temporary folder with links to charts/ and examples/.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
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
        line: number of its first line.
        kind: yaml, sh, output or console.
        text: its content.
        code: expected exit code of an sh block.
    """

    line: int
    kind: str
    text: str
    code: int = 0


def needs(tutorial: Path) -> str:
    """Return the tutorial's requirement: nothing, apiserver or cluster."""
    found = re.match(r"<!-- needs: (nothing|apiserver|cluster) -->", tutorial.read_text())
    assert found, f"{tutorial} does not state its requirement"
    return found[1]


def tutorials(need: str) -> list[Path]:
    """Return the tutorials with this requirement."""
    return [each for each in sorted(Path(__file__).parent.glob("[0-9]*.md")) if needs(each) == need]


def blocks(text: str) -> Iterator[Block]:
    """Iterate over the blocks of a tutorial."""
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        assert match[1] in ("yaml", "sh", "output", "console"), f"line {line}: unknown kind of block: {match[1]}"
        code = int(match[2].removeprefix("exit=")) if match[2] else 0
        yield Block(line, match[1], match[3], code)


def run(tutorial: Path, environment: Mapping[str, str]) -> None:
    """Run a tutorial.

    Raises:
        AssertionError: an exit code or an output differs from the tutorial's.
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
    """Return the first line of `expected` that does not follow the previous ones in `printed`, or an empty string.

    Any number of spaces counts as one.
    """
    lines = iter(printed.splitlines())
    for line in filter(str.strip, expected.splitlines()):
        pattern = re.compile(r".*".join(re.escape(" ".join(part.split())) for part in line.split("…")))
        if not any(pattern.search(" ".join(each.split())) for each in lines):
            return line
    return ""


def missing_programs(tutorial: Path, path: str) -> list[str]:
    """Return those of kubectl, helm and stoker that the tutorial's sh blocks run and no folder of `path` has."""
    commands = "".join(block.text for block in blocks(tutorial.read_text()) if block.kind == "sh")
    used = [name for name in ("kubectl", "helm", "stoker") if re.search(rf"^\W*{name} ", commands, re.MULTILINE)]
    return [name for name in used if shutil.which(name, path=path) is None]


def main() -> int:
    """Run the tutorials of the command line. Return the exit code: 1 if one fails, 2 if it cannot be run."""
    parser = argparse.ArgumentParser(description="Run tutorials against the current cluster of kubectl.")
    parser.add_argument("tutorials", nargs="+", type=Path, metavar="FILE", help="such as docs/tutorials/01-install.md")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for tutorial in parser.parse_args().tutorials:
        if not tutorial.is_file() or not re.match(r"<!-- needs: ", tutorial.read_text()):
            parser.error(f"{tutorial} is not a tutorial; use a file of docs/tutorials, such as 01-install.md")
        if missing := missing_programs(tutorial, path):
            parser.error(f"{tutorial} needs {', '.join(missing)} in PATH; install what is missing")
        try:
            run(tutorial, {"PATH": path})
        except AssertionError as problem:
            sys.stderr.write(f"{tutorial}: failed: {problem}\n")
            return 1
        sys.stdout.write(f"{tutorial}: passed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
