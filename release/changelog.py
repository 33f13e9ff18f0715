"""Sections of CHANGELOG.md: `## Unreleased`, then `## VERSION` for each release, the newest first."""

from __future__ import annotations

import re

from release.errors import ReleaseError

UNRELEASED = "Unreleased"

#: A link without scheme and not to an anchor of the same page.
_RELATIVE_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z][a-z0-9+.-]*:|[#/])([^)\s]+)\)")
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


def with_absolute_links(text: str, pages: str | None) -> str:
    """Return notes whose relative links lead to the repository's pages.

    Args:
        pages: URL of the repository's files at the release; None: it is not known, and links become plain text.
    """

    def absolute(match: re.Match[str]) -> str:
        label, target = match.groups()
        return label if pages is None else f"[{label}]({pages}/{target})"

    return _RELATIVE_LINK.sub(absolute, text)


def release(text: str, version: str) -> str:
    """Return the changelog with the unreleased changes as the section of a new version."""
    found = sections(text)
    if not found.get(UNRELEASED):
        raise ReleaseError("CHANGELOG.md has no changes under `## Unreleased`; describe there what the release changes")
    if version in found:
        raise ReleaseError(f"CHANGELOG.md already has a section `## {version}`; choose a later version")
    return _HEADING.sub(lambda match: f"{match[0]}\n\n## {version}" if match[1] == UNRELEASED else match[0], text)
