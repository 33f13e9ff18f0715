"""The version: pyproject.toml states it, and the files listed here repeat it.

python -m release.version --check    fail if a file states another version
python -m release.version 0.2.0      set it everywhere, and name the changelog's section of unreleased changes
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from release import changelog
from release.errors import ReleaseError, exit_code

ROOT = Path(__file__).resolve().parents[1]

#: Python, Helm and container registries read such versions in the same way.
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")

#: The labels of PyPI's well-known project URLs that mean the repository, without capitals and punctuation.
REPOSITORY_LABELS = {"repository", "source", "sourcecode", "github"}

_NUMBER = r"(\d+\.\d+\.\d+)"
_NAME_OF_IMAGE = r"stoker/(?:operator|gateway|engine-\w+):"
_IMAGE = _NAME_OF_IMAGE + _NUMBER

#: Files, and the patterns whose group is the version. Files without a match are permitted, except those of `REQUIRED`.
REPEATED = {
    "charts/stoker/Chart.yaml": rf"^(?:version|appVersion): {_NUMBER}$",
    "operator/stoker_operator/plan/catalogue.yaml": _IMAGE,
    "examples/*.yaml": _IMAGE,
    "docs/**/*.md": _IMAGE,
    "tests/operator/**/*.py": _IMAGE,
    "tests/operator/manifests/golden/*.yaml": _IMAGE,
    "tests/golden/openapi.json": rf'^  "version": "{_NUMBER}"$',
    "e2e/apiserver/*.py": _IMAGE,
    "e2e/apiserver/golden/*.yaml": rf"(?:kubernetes\.io/version: |helm\.sh/chart: stoker-|{_NAME_OF_IMAGE}){_NUMBER}",
}
REQUIRED = ("charts/stoker/Chart.yaml", "operator/stoker_operator/plan/catalogue.yaml", "tests/golden/openapi.json")


def version(root: Path = ROOT) -> str:
    """Return the version that pyproject.toml states."""
    stated: str = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return stated


def repository_pages(number: str, root: Path = ROOT) -> str | None:
    """Return the URL of the repository's files at a version's tag, or None if pyproject.toml does not state it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for label, url in project.get("urls", {}).items():
        if re.sub(r"[^a-z]", "", label.lower()) in REPOSITORY_LABELS:
            return f"{url.rstrip('/').removesuffix('.git')}/blob/v{number}"
    return None


def check(root: Path = ROOT) -> list[str]:
    """Return a message for each place that states another version than pyproject.toml."""
    expected = version(root)
    wrong = []
    for path, pattern in _files(root):
        text = path.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            if match[1] != expected:
                line = text.count("\n", 0, match.start(1)) + 1
                wrong.append(f"{path.relative_to(root)}:{line} states version {match[1]}, pyproject.toml {expected}")
    for name in REQUIRED:
        if not re.search(REPEATED[name], (root / name).read_text(encoding="utf-8"), re.MULTILINE):
            wrong.append(f"{name} states no version")
    return wrong


def set_version(new: str, root: Path = ROOT) -> None:
    """Write a version to pyproject.toml and to the files that repeat it; a new one gets the unreleased changes."""
    if not VERSION.fullmatch(new):
        raise ReleaseError(f"{new!r} is no version; use three numbers, such as 0.2.0")
    before = version(root)
    if _numbers(new) < _numbers(before):
        raise ReleaseError(f"{new} is older than {before}, the version of pyproject.toml")
    changes = root / "CHANGELOG.md"
    text = changes.read_text(encoding="utf-8")
    if new != before or new not in changelog.sections(text):
        text = changelog.release(text, new)
    project = (root / "pyproject.toml", re.compile(rf'^version = "{_NUMBER}"$', re.MULTILINE))
    for path, pattern in (project, *_files(root)):
        if _write(path, pattern, new):
            print(f"{path.relative_to(root)}: {new}")
    changes.write_text(text, encoding="utf-8")


def _numbers(stated: str) -> tuple[int, ...]:
    return tuple(map(int, stated.split(".")))


def _files(root: Path) -> Iterator[tuple[Path, re.Pattern[str]]]:
    for files, pattern in REPEATED.items():
        for path in sorted(root.glob(files)):
            yield path, re.compile(pattern, re.MULTILINE)


def _write(path: Path, pattern: re.Pattern[str], new: str) -> bool:
    """Set the version in a file; return whether the file changes."""
    text = path.read_text(encoding="utf-8")
    changed = pattern.sub(lambda match: match[0].replace(match[1], new), text)
    if changed != text:
        path.write_text(changed, encoding="utf-8")
    return changed != text


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m release.version", description=__doc__.split("\n", 1)[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail if a file states another version than pyproject.toml")
    what.add_argument("version", nargs="?", help="the new version")
    options = parser.parse_args()
    if not options.check:
        set_version(options.version)
    elif wrong := check():
        remedy = f"run `make release-version VERSION={version()}`, or another version"
        raise ReleaseError("\n  ".join(["the files do not state one version:", *wrong, remedy]))


if __name__ == "__main__":
    raise SystemExit(exit_code("release.version", main))
