#!/usr/bin/env python3
"""Compare the files of two images: `images/compare.py IMAGE IMAGE`. Exits with 1 if they differ.

It compares names, kinds, modes, owners, links and contents. It ignores modification times, which have no effect on
running programs, and layers, which depend on the builder.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from typing import IO, NamedTuple, cast


class Entry(NamedTuple):
    """A file, folder, link or the like in an image.

    Attributes:
        kind: tar's type flag.
        mode: permission bits.
        owner: user id, group id.
        content: a file's SHA-256, a link's target, otherwise empty.
    """

    kind: str
    mode: int
    owner: tuple[int, int]
    content: str


def entries(image: str) -> dict[str, Entry]:
    """Return the entries of the file system of a container of the image, by name.

    Raises:
        subprocess.CalledProcessError: the image does not exist.
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
    """Return the entries of a tar archive, by name."""
    found = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = member.linkname
            if member.isfile() and (file := archive.extractfile(member)):
                content = hashlib.file_digest(cast("io.BufferedReader", file), "sha256").hexdigest()
            found[member.name] = Entry(member.type.decode(), member.mode, (member.uid, member.gid), content)
    return found


def differences(one: dict[str, Entry], other: dict[str, Entry]) -> list[str]:
    """Return one line per difference."""
    lines = []
    for name in sorted(one.keys() | other.keys()):
        if name not in other:
            lines.append(f"only in the first: {name}")
        elif name not in one:
            lines.append(f"only in the second: {name}")
        elif one[name] != other[name]:
            lines.append(f"{name}: {one[name]} in the first, {other[name]} in the second")
    return lines


def main() -> int:
    one, other = map(entries, sys.argv[1:])
    lines = differences(one, other)
    print("\n".join(lines) or f"no differences in {len(one)} entries")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
