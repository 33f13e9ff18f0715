"""Build the files of a release into a folder; nothing is published.

    python -m release.build [--dist FOLDER] [--dry-run] [--images "operator gateway engine-cpu"]

Everything but the images is built from an export of the commit, so uncommitted and ignored files are never included.
Wheel, sdist and chart are built twice, so that a file that depends on more than the commit is found.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from release import changelog, installed, sbom
from release.commands import UV, run
from release.errors import ReleaseError, exit_code
from release.version import ROOT, check, repository_pages, version

#: Folders whose packages the wheel contains.
SOURCES = ("cli", "common", "engine", "gateway", "operator")
CHECKSUMS = "SHA256SUMS"
NOTES = "RELEASE_NOTES.md"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m release.build", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", metavar="FOLDER", help="where; it must not exist")
    parser.add_argument("--dry-run", action="store_true", help="only warn about a state that must not be released")
    parser.add_argument("--images", default="", metavar="NAMES", help="images to build and save, separated by spaces")
    options = parser.parse_args()
    build(options.dist.resolve(), options.images.split(), options.dry_run)


def build(dist: Path, images: list[str], dry_run: bool) -> None:
    """Build a release of the commit that is checked out.

    Args:
        dry_run: only warn about a state that must not be released.
    """
    if dist.exists():
        raise ReleaseError(f"{dist} exists; remove it, or choose another folder with `make release DIST=FOLDER`")
    partial = dist.with_name(f"{dist.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    if wrong := check():
        raise ReleaseError("\n  ".join(["the files do not state one version; run `make verify`:", *wrong]))
    number = version()
    problems = unfit(ROOT, number)
    if problems and not dry_run:
        raise ReleaseError("\n  ".join(["this state must not be released:", *problems]))
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    helm = find_helm()
    commit = run("git", "rev-parse", "--short", "HEAD", cwd=ROOT).strip()
    print(f"stoker {number}, commit {commit}, into {dist}", flush=True)
    partial.mkdir(parents=True)
    try:
        build_files(partial, number, helm, images, dry_run)
        partial.rename(dist)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for path in sorted(dist.iterdir()):
        print(f"{path.stat().st_size:>13,}  {path.name}")


def build_files(dist: Path, number: str, helm: Path, images: list[str], dry_run: bool) -> None:
    """Build and check the files of a release in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="stoker-release-") as name:
        source, again, outside = (Path(name, each) for each in ("source", "again", "outside"))
        with progress("export of the commit"):
            date = export(ROOT, source)
        with progress("wheel and sdist"):
            wheel = build_python(source, dist, again, date)
        with progress("files of the wheel"):
            check_files(wheel, source)
        with progress("wheel installed outside the tree"):
            outside.mkdir()
            installed.check(wheel, number, source, outside)
        with progress("chart"):
            package_chart(helm, source, dist, again, number)
        with progress("bill of materials"):
            sbom.write(Path(sys.executable), source, dist / f"stoker-{number}.cdx.json")
        write_notes(source, number, dist, dry_run)
    for image in images:
        with progress(f"image {image}"):
            build_image(image, number, dist)
    write_checksums(dist)


@contextmanager
def progress(step: str) -> Iterator[None]:
    """Print a step when it starts, and its time when it ends."""
    print(f"  {step} ...", end="", flush=True)
    started = time.monotonic()
    try:
        yield
    except BaseException:
        print(flush=True)
        raise
    print(f" {time.monotonic() - started:.1f} s", flush=True)


def unfit(root: Path, number: str) -> list[str]:
    """Return why the commit that is checked out must not be released as a version, each with its remedy."""
    problems = []
    if run("git", "status", "--porcelain", cwd=root):
        problems.append("the tree has uncommitted changes, which would not be included; commit or stash them")
    tag, later = f"v{number}", "`make release-version VERSION=…` sets the next one"
    tags = run("git", "tag", "--list", "v*", "--points-at", "HEAD", cwd=root).split()
    if tags and tag not in tags:
        problems.append(f"the tag {tags[0]} of this commit is not that of version {number}; {later}")
    if not tags and run("git", "tag", "--list", tag, cwd=root):
        problems.append(f"version {number} is released already: the tag {tag} is at another commit; {later}")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        changelog.notes(changes, number)
    except ReleaseError as error:
        problems.append(str(error))
    else:
        if changelog.sections(changes).get(changelog.UNRELEASED):
            problems.append(f"CHANGELOG.md has unreleased changes; move them to `## {number}`, or {later}")
    return problems


def find_helm() -> Path:
    """Return helm 4: the one that the end-to-end tests built, or the one in PATH."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    built = Path(os.environ.get("STOKER_CACHE") or Path(home, "stoker"), "e2e/bin/helm")
    found = str(built) if built.exists() else shutil.which("helm")
    build = "build it with Go: `e2e/cluster/build helm`"
    if found is None:
        raise ReleaseError(f"helm is not installed: see https://helm.sh/docs/intro/install, or {build}")
    if not run(found, "version", "--template", "{{.Version}}").startswith("v4."):
        raise ReleaseError(f"{found} is not helm 4, whose packages are reproducible; install that, or {build}")
    return Path(found)


def export(root: Path, folder: Path) -> str:
    """Copy the files of the commit to a folder, with the commit's date; return it in seconds since 1970."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    run("git", "archive", "--output", archive, "HEAD", cwd=root)
    run("tar", "--extract", "--file", archive, "--directory", folder)
    return run("git", "log", "-1", "--format=%ct", cwd=root).strip()


def build_python(source: Path, dist: Path, again: Path, date: str) -> Path:
    """Build the sdist, and the wheel from it; return the wheel.

    Both are built again, the wheel directly from the sources: an sdist that lacks a file, and files that differ between
    builds, are errors.
    """
    # Without --sdist and --wheel, uv builds the wheel from the sdist.
    for folder, kinds in ((dist, ()), (again, ("--sdist", "--wheel"))):
        run(
            UV, "build", "--build-constraints", source / "constraints.txt", "--python", sys.executable,
            "--no-create-gitignore", "--out-dir", folder, *kinds, source,
            environment={"SOURCE_DATE_EPOCH": date},
        )  # fmt: skip
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    for file in (wheel, sdist):
        require_equal(file, again / file.name)
    return wheel


def check_files(wheel: Path, source: Path) -> None:
    """Fail unless a wheel has exactly the packages' files of the commit, and its metadata."""
    expected = {
        str(path.relative_to(source / folder))
        for folder in SOURCES
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    remedy = "see [tool.hatch.build] in pyproject.toml"
    if missing := expected - packed:
        raise ReleaseError(f"{wheel.name} lacks {', '.join(sorted(missing))}; {remedy}")
    if surplus := packed - expected:
        raise ReleaseError(f"{wheel.name} has files that the commit lacks: {', '.join(sorted(surplus))}; {remedy}")


def package_chart(helm: Path, source: Path, dist: Path, again: Path, number: str) -> None:
    """Package the chart twice, and fail if the packages differ."""
    for folder in (dist, again):
        run(helm, "package", source / "charts/stoker", "--destination", folder)
    name = f"stoker-{number}.tgz"
    require_equal(dist / name, again / name)


def build_image(image: str, number: str, dist: Path) -> None:
    """Build an image with the version as its tag, and save it as an archive for `docker load`."""
    run(ROOT / "images/build", image, cwd=ROOT, environment={"TAG": number, "SAVE": str(dist)})


def require_equal(one: Path, other: Path) -> None:
    """Fail unless two files have the same content."""
    if one.read_bytes() != other.read_bytes():
        remedy = "compare them, and see [tool.hatch.build] in pyproject.toml"
        raise ReleaseError(
            f"two builds of {one.name} differ: the sdist lacks a file, or more than sources matters; {remedy}"
        )


def write_notes(source: Path, number: str, dist: Path, dry_run: bool) -> None:
    """Write the release notes: the version's section of the changelog."""
    changes = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        text = changelog.notes(changes, number)
    except ReleaseError:
        if not dry_run:
            raise
        text = changelog.notes(changes, changelog.UNRELEASED)
    text = changelog.with_absolute_links(text, repository_pages(number, source))
    (dist / NOTES).write_text(text, encoding="utf-8")


def write_checksums(dist: Path) -> None:
    """Write the files' checksums, for `sha256sum --check`."""
    lines = []
    for path in sorted(dist.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (dist / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(exit_code("release.build", main))
