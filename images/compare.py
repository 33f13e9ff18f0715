#!/usr/bin/env python3
"""Say whether two images hold the same files: `images/compare.py IMAGE IMAGE`; exits with 1 where they do not.

Compared are names, kinds, modes, owners, links and contents; not when a file was written, which images record and
nothing that runs depends on. Not compared are layers: how files came into an image is the builder's business.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from typing import IO, NamedTuple, cast


class Entry(NamedTuple):
    """What an image holds under one name.

    Attributes:
        kind: tar's letter for a file, a folder, a link, ….
        content: a file's SHA-256, a link's target, otherwise empty.
    """

    kind: str
    mode: int
    owner: tuple[int, int]
    content: str


def entries(image: str) -> dict[str, Entry]:
    """Everything in the file system of a container that would be started from the image.

    Raises:
        subprocess.CalledProcessError: there is no such image.
    """
    container = subprocess.run(
        ["docker", "create", image], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export:
            found = read(cast("IO[bytes]", export.stdout))
        if export.returncode:
            raise subprocess.CalledProcessError(export.returncode, export.args)
        return found
    finally:
        subprocess.run(["docker", "rm", "--volumes", container], stdout=subprocess.DEVNULL, check=True)


def read(stream: IO[bytes]) -> dict[str, Entry]:
    """The entries of a tar archive, by name."""
    found = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = member.linkname
            if member.isfile() and (file := archive.extractfile(member)):
                content = hashlib.file_digest(cast("io.BufferedReader", file), "sha256").hexdigest()
            found[member.name] = Entry(member.type.decode(), member.mode, (member.uid, member.gid), content)
    return found


def differences(one: dict[str, Entry], other: dict[str, Entry]) -> list[str]:
    """What differs, a line each."""
    lines = []
    for name in sorted(one.keys() | other.keys()):
        if name not in other:
            lines.append(f"only in the first: {name}")
        elif name not in one:
            lines.append(f"only in the second: {name}")
        elif one[name] != other[name]:
            lines.append(f"{name}: {one[name]} is not {other[name]}")
    return lines


def main() -> int:
    one, other = map(entries, sys.argv[1:])
    lines = differences(one, other)
    print("\n".join(lines) or f"the same: {len(one)} entries")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
