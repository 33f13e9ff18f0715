"""Sections of CHANGELOG.md: `## Unreleased`, then `## VERSION` for each release, the newest first."""

from __future__ import annotations

import re

from release.errors import ReleaseError

UNRELEASED = "Unreleased"

_HEADING = re.compile(r"^## (\S+)[ \t]*$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """Return the text of each section by its heading, in the file's order."""
    _title, *parts = _HEADING.split(text)
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def notes(text: str, version: str) -> str:
    """Return the notes of a release: its section; an error if there is none, or it is empty."""
    found = sections(text).get(version)
    if not found:
        raise ReleaseError(
            f"CHANGELOG.md has no changes under `## {version}`; `make release-version VERSION={version}` moves the "
            "unreleased changes there"
        )
    return found + "\n"


def release(text: str, version: str) -> str:
    """Return the changelog with the unreleased changes as the section of a new version."""
    found = sections(text)
    if not found.get(UNRELEASED):
        raise ReleaseError("CHANGELOG.md has no changes under `## Unreleased`; describe there what the release changes")
    if version in found:
        raise ReleaseError(f"CHANGELOG.md already has a section `## {version}`; choose a later version")
    return _HEADING.sub(lambda match: f"{match[0]}\n\n## {version}" if match[1] == UNRELEASED else match[0], text)
