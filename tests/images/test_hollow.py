"""A hollowed library can be linked against as before, is small, and runs no code of its own."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

hollow: Any = runpy.run_path(str(Path(__file__).parents[2] / "images/engine/hollow.py"))["hollow"]

LIBRARY = """
#include <stdlib.h>
const char large[1 << 22] = {1};
int changing[1 << 18] = {2};
const char *const relocated[] = {large, large + 1};
int never_called(int number) { return large[number] + changing[number]; }
__attribute__((constructor)) static void begin(void) { abort(); }
__attribute__((destructor)) static void end(void) { abort(); }
"""
PROGRAM = """
#include <stdio.h>
int never_called(int);
extern int changing[];
int main(int arguments, char **words) {
    if (arguments > 1) return never_called(arguments);
    return printf("%d\\n", changing[0]) < 0;
}
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program linked against `libof.so`, which calls it if it has an argument."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "of.c").write_text(LIBRARY)
    (tmp_path / "main.c").write_text(PROGRAM)
    (tmp_path / "names.map").write_text("OF_1 { global: *; };")
    for command in (
        "gcc -shared -fPIC -o libof.so of.c -Wl,-soname,libof.so.1 -Wl,--version-script=names.map",
        "ln -s libof.so libof.so.1",
        "gcc -o main main.c -L. -lof -Wl,-rpath,. -Wl,-z,now",
    ):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    return tmp_path / "main"


def test_program_linked_against_a_hollowed_library_starts(program: Path) -> None:
    library = program.with_name("libof.so")
    before = library.stat()
    assert subprocess.run(["./main"], cwd=program.parent, capture_output=True).returncode != 0  # the constructor fails
    hollow(library)
    assert library.stat().st_size < 1 << 16 < before.st_size
    assert library.stat().st_mode == before.st_mode
    done = subprocess.run(["./main"], cwd=program.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n")  # all bounds exist, and enclose nothing
    assert subprocess.run(["./main", "call"], cwd=program.parent, capture_output=True).returncode < 0


@pytest.mark.parametrize(
    "content", [b"", b"#!/bin/sh", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x01" + bytes(100)]
)
def test_other_files_are_refused_and_unchanged(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.so"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"file\.so"):
        hollow(file)
    assert file.read_bytes() == content
