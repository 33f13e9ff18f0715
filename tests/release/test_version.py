"""One version: differences are found with their place, and a new version is set everywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from release import changelog, version
from release.errors import ReleaseError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that state a version."""
    for files in ("pyproject.toml", "CHANGELOG.md", *version.REPEATED):
        for path in version.ROOT.glob(files):
            copy = tmp_path / path.relative_to(version.ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## Unreleased\n", "## Unreleased\n\n- A new change.\n"))
    return tmp_path


def test_version_is_set_everywhere(tree: Path) -> None:
    before = version.version(tree)
    version.set_version("7.8.9", tree)
    assert version.version(tree) == "7.8.9" and version.check(tree) == []
    assert "version: 7.8.9\nappVersion: 7.8.9\n" in (tree / "charts/stoker/Chart.yaml").read_text()
    assert "stoker/engine-cpu:7.8.9" in (tree / "operator/stoker_operator/plan/catalogue.yaml").read_text()
    assert "stoker-7.8.9" in (tree / "e2e/apiserver/golden/chart-gateway.yaml").read_text()
    assert not [path for path in tree.rglob("*.yaml") if f"stoker/engine-cpu:{before}" in path.read_text()]
    found = changelog.sections((tree / "CHANGELOG.md").read_text())
    assert found["7.8.9"].startswith("- A new change.") and not found["Unreleased"]


def test_different_version_in_a_file_is_found(tree: Path) -> None:
    chart = tree / "charts/stoker/Chart.yaml"
    stated = version.version(tree)
    chart.write_text(chart.read_text().replace(f"appVersion: {stated}", "appVersion: 9.9.9"))
    assert version.check(tree) == [f"charts/stoker/Chart.yaml:6 states version 9.9.9, pyproject.toml {stated}"]
    version.set_version(stated, tree)  # also without a new section of the changelog
    assert version.check(tree) == []
    chart.write_text("name: stoker\n")
    assert version.check(tree) == ["charts/stoker/Chart.yaml states no version"]


@pytest.mark.parametrize(
    ("new", "message"),
    [("", "use three numbers"), ("v1.0.0", "use three numbers"), ("1.0.0rc1", "use three numbers"), ("0.0.1", "older")],
)
def test_wrong_version_changes_nothing(tree: Path, new: str, message: str) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    with pytest.raises(ReleaseError, match=message):
        version.set_version(new, tree)
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before
