"""Sections of the changelog, and a release's notes."""

from __future__ import annotations

from pathlib import Path

import pytest
from release import changelog
from release.errors import ReleaseError

TEXT = "# Changelog\n\n## Unreleased\n\n### Added\n- New.\n\n## 0.2.0\n\n- Two.\n\n## 0.1.0\n\n- One.\n"


def test_notes_are_the_versions_section() -> None:
    assert changelog.notes(TEXT, "0.2.0") == "- Two.\n"
    assert changelog.notes(TEXT, "0.1.0") == "- One.\n"
    with pytest.raises(ReleaseError, match=r"no changes under `## 0\.3\.0`"):
        changelog.notes(TEXT, "0.3.0")


def test_relative_links_of_notes_become_absolute() -> None:
    text = "- A ([guide](docs/a.md#b)), [page](https://host/x), [top](#top), [b](b.md).\n"
    assert changelog.with_absolute_links(text, "https://host/stoker/blob/v0.2.0") == (
        "- A ([guide](https://host/stoker/blob/v0.2.0/docs/a.md#b)), [page](https://host/x), [top](#top), "
        "[b](https://host/stoker/blob/v0.2.0/b.md).\n"
    )
    assert changelog.with_absolute_links(text, None) == "- A (guide), [page](https://host/x), [top](#top), b.\n"


def test_release_names_the_unreleased_changes() -> None:
    released = changelog.release(TEXT, "0.3.0")
    assert changelog.notes(released, "0.3.0") == "### Added\n- New.\n"
    assert list(changelog.sections(released)) == ["Unreleased", "0.3.0", "0.2.0", "0.1.0"]
    with pytest.raises(ReleaseError, match="no changes under `## Unreleased`"):
        changelog.release(released, "0.4.0")
    with pytest.raises(ReleaseError, match=r"already has a section `## 0\.2\.0`"):
        changelog.release(TEXT, "0.2.0")


def test_each_entry_of_the_changelog_is_one_line() -> None:
    lines = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("  ") or len(line) > 140] == []
