"""The comparison of images reports exactly the relevant differences."""

from __future__ import annotations

import io
import runpy
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

compare = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "images/compare.py")))


def archive(*members: tuple[str, bytes, dict[str, object]]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as made:
        for name, content, attributes in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            vars_of = {"mode": 0o644, "mtime": 1.0} | attributes
            for attribute, value in vars_of.items():
                setattr(member, attribute, value)
            made.addfile(member, io.BytesIO(content))
    stream.seek(0)
    return stream


def differences(one: io.BytesIO, other: io.BytesIO) -> list[str]:
    return list(compare.differences(compare.read(one), compare.read(other)))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"mtime": 99.0}, False),
        ({"mode": 0o755}, True),
        ({"uid": 65532}, True),
        ({"type": tarfile.SYMTYPE, "linkname": "elsewhere", "size": 0}, True),
    ],
)
def test_relevant_attributes_are_compared(change: dict[str, object], differs: bool) -> None:
    lines = differences(archive(("bin/stoker", b"x", {})), archive(("bin/stoker", b"x", change)))
    assert [line.split(":")[0] for line in lines] == (["bin/stoker"] if differs else [])


def test_changed_added_and_removed_files_are_reported() -> None:
    one = archive(("same", b"1", {}), ("edited", b"1", {}), ("gone", b"1", {}))
    other = archive(("new", b"1", {}), ("edited", b"2", {}), ("same", b"1", {}))
    edited, gone, new = differences(one, other)
    assert edited.startswith("edited: ")
    assert (gone, new) == ("only in the first: gone", "only in the second: new")


def test_link_targets_are_compared() -> None:
    def link(target: str) -> io.BytesIO:
        return archive(("python", b"", {"type": tarfile.SYMTYPE, "linkname": target}))

    assert not differences(link("python3"), link("python3"))
    assert len(differences(link("python3"), link("python4"))) == 1
