"""States that must not be released are named with their remedy, and a wheel with other files is refused."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from release import build, sbom
from release.errors import ReleaseError


@pytest.fixture
def repository(tmp_path: Path) -> Any:
    """A repository with a commit that can be released as 1.0.0."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    def commit(changes: str) -> None:
        (tmp_path / "CHANGELOG.md").write_text(changes)
        git("add", ".")
        git("commit", "--quiet", "--message=Change")

    git("init", "--quiet")
    commit("# Changelog\n\n## Unreleased\n\n## 1.0.0\n\n- First.\n")
    return SimpleNamespace(git=git, commit=commit, path=tmp_path, unfit=lambda: build.unfit(tmp_path, "1.0.0"))


def test_commit_with_or_without_its_tag_can_be_released(repository: Any) -> None:
    assert repository.unfit() == []
    repository.git("tag", "v1.0.0")
    assert repository.unfit() == []


def test_uncommitted_file_prevents_a_release(repository: Any) -> None:
    (repository.path / "new").touch()
    [problem] = repository.unfit()
    assert "uncommitted changes" in problem and "commit or stash" in problem


def test_tag_of_another_version_prevents_a_release(repository: Any) -> None:
    repository.git("tag", "v2.0.0")
    [problem] = repository.unfit()
    assert "the tag v2.0.0 of this commit" in problem and "make release-version" in problem


def test_earlier_version_cannot_be_released_again(repository: Any) -> None:
    repository.git("tag", "v1.0.0")
    repository.commit("# Changelog\n\n## Unreleased\n\n- Second.\n\n## 1.0.0\n\n- First.\n")
    released, unreleased = repository.unfit()
    assert "the tag v1.0.0 is at another commit" in released and "make release-version" in released
    assert "unreleased changes" in unreleased and "`## 1.0.0`" in unreleased


def test_version_without_notes_cannot_be_released(repository: Any) -> None:
    repository.commit("# Changelog\n\n## Unreleased\n\n- First.\n")
    [problem] = repository.unfit()
    assert "no changes under `## 1.0.0`" in problem and "make release-version VERSION=1.0.0" in problem


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("", "guide"),
        ('[project.urls]\nHomepage = "https://example.com"\n', "guide"),
        (
            '[project.urls]\n"Source Code" = "https://host/org/stoker.git/"\n',
            "[guide](https://host/org/stoker/blob/v0.1.0/docs/a.md)",
        ),
    ],
)
def test_links_of_notes_lead_to_the_repository(tmp_path: Path, urls: str, expected: str) -> None:
    (tmp_path / "CHANGELOG.md").write_text("## 0.1.0\n\n- A ([guide](docs/a.md)).\n")
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "0.1.0"\n{urls}')
    build.write_notes(tmp_path, "0.1.0", tmp_path, dry_run=False)
    assert (tmp_path / build.NOTES).read_text() == f"- A ({expected}).\n"


def test_wheel_with_other_files_than_the_commit_is_refused(tmp_path: Path) -> None:
    for name in ("cli/stoker/main.py", "engine/stoker_engine/kernel.cpp", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for packed, message in (
        (("stoker/main.py", "stoker_engine/kernel.cpp"), None),
        (("stoker/main.py",), "lacks stoker_engine/kernel.cpp"),
        (("stoker/main.py", "stoker_engine/kernel.cpp", "tests/a.py"), "files that the commit lacks: tests/a.py"),
    ):
        wheel = tmp_path / "stoker.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in (*packed, "stoker-1.0.0.dist-info/METADATA"):
                archive.writestr(name, "")
        if message is None:
            build.check_files(wheel, tmp_path)
        else:
            with pytest.raises(ReleaseError, match=message):
                build.check_files(wheel, tmp_path)


def test_bill_of_materials_omits_development_packages() -> None:
    document = {
        "metadata": {"component": {"bom-ref": "root"}},
        "components": [{"name": "PyYAML", "bom-ref": "PyYAML==6"}, {"name": "pytest", "bom-ref": "pytest==9"}],
        "dependencies": [
            {"ref": "root", "dependsOn": ["PyYAML==6", "pytest==9"]},
            {"ref": "PyYAML==6"},
            {"ref": "pytest==9", "dependsOn": ["PyYAML==6"]},
        ],
    }
    restricted = sbom.restricted(document, {"pyyaml"})
    assert [each["name"] for each in restricted["components"]] == ["PyYAML"]
    assert restricted["dependencies"] == [{"ref": "root", "dependsOn": ["PyYAML==6"]}, {"ref": "PyYAML==6"}]
    with pytest.raises(ReleaseError, match="lacks torch"):
        sbom.restricted(document, {"pyyaml", "torch"})


def test_packages_of_an_extra_are_found_with_their_dependencies() -> None:
    operator, engine = (sbom.required("stoker", (extra,)) for extra in ("operator", "engine"))
    assert {"kopf", "pydantic-core", "certifi"} <= operator.keys() and "torch" not in operator
    assert "torch" in engine and not engine.keys() & {"kopf", "pytest"}
