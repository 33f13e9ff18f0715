"""Print the tests of files that differ from another commit: `python tests/changed.py [COMMIT]`.

Tests mirror the packages: a module's tests are those of its folder. Files outside the packages have their tests listed
here. This is a first check (`make check`); other effects of a change are found by `make test` and CI.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "common": "stoker_common",
    "engine": "stoker_engine",
    "operator": "stoker_operator",
    "gateway": "stoker_gateway",
}
BESIDE = {
    "charts": ["tests/operator"],
    "crds": ["tests/operator"],
    "examples": ["tests/operator/cli", "tests/engine/server/test_python_examples.py", "tests/test_docs.py"],
    "images": ["tests/images"],
    "benchmarks": ["tests/benchmarks"],
    "release": ["tests/release"],
    "CHANGELOG.md": ["tests/release"],
    "docs": ["tests/test_docs.py"],
    **{f"{name}.md": ["tests/test_docs.py"] for name in ("README", "CONTRIBUTING", "SECURITY", "SUPPORT")},
}
#: Tests that recompile the kernels, which takes minutes.
COMPILES = {"tests/engine/kernels/test_sanitizers.py", "tests/engine/kernels/test_emulated.py"}


def tests_for(file: str) -> list[str]:
    """Return test files and folders, relative to the root, for a file of the repository; empty if it has none."""
    first, *rest = PurePosixPath(file).parts
    if first == "tests":
        path = ROOT / file
        return [file] if path.name.startswith("test_") else [str(PurePosixPath(file).parent)] if rest[1:] else []
    if rest[:1] == [PACKAGES.get(first)]:
        folder = f"tests/{first}"
        return [f"{folder}/{rest[1]}"] if rest[2:] else [str(each) for each in _named_like(folder, rest[1])]
    return BESIDE.get(first, [])


def _named_like(folder: str, module: str) -> list[PurePosixPath]:
    stem = PurePosixPath(module).stem
    return [PurePosixPath(folder, each.name) for each in sorted((ROOT / folder).glob(f"test_{stem}*.py"))]


def changed(commit: str) -> list[str]:
    """Return the files that differ from the merge base with `commit`, including untracked ones."""
    base = _git("merge-base", "HEAD", commit)[0]
    return _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def main() -> None:
    """Print the tests on one line."""
    files = changed(*sys.argv[1:] or ["HEAD"])
    found = {each for file in files for each in tests_for(file) if (ROOT / each).exists()}
    found -= {each for each in found for folder in found if each.startswith(f"{folder}/")}
    ignored = [f"--ignore={each}" for each in sorted(COMPILES - set(files))]
    sys.stdout.write(" ".join([*sorted(found), *ignored]) + "\n" if found else "")


if __name__ == "__main__":
    main()
