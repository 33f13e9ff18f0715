"""The software bill of materials: the packages that constraints.txt pins, as far as the extras of users need them.

CycloneDX's own tool reads the environment of `make setup`, which has the packages' licences and requirements. What only
development needs is removed afterwards.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.commands import UV, run
from release.errors import ReleaseError

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "release/tools.txt"

#: The extras that users install; the others are for development.
EXTRAS = ("engine", "operator", "gateway", "demo")


def write(python: Path, project: Path, output: Path) -> int:
    """Write the bill of materials of an environment; return the number of packages.

    Args:
        python: the environment's Python, in which this process runs.
        project: folder with pyproject.toml and constraints.txt.
    """
    names = required("stoker", EXTRAS)
    pins = pinned(project / "constraints.txt")
    for name, installed in sorted(names.items()):
        if pins.get(name) != installed:
            stated = f"pins {pins[name]}" if name in pins else "does not pin it"
            raise ReleaseError(
                f"{name} {installed} is installed, but constraints.txt {stated}; pin it or run `make setup`"
            )
    # Validation against CycloneDX's schema takes fifteen seconds.
    run(
        UV, "tool", "run", "--constraints", TOOLS, "--from", "cyclonedx-bom", "cyclonedx-py", "environment",
        "--pyproject", project / "pyproject.toml", "--mc-type", "application", "--spec-version", "1.6",
        "--output-reproducible", "--no-validate", "--output-file", output, python,
    )  # fmt: skip
    document = restricted(json.loads(output.read_text(encoding="utf-8")), set(names))
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return len(document["components"])


def required(name: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Return the installed version of each package that a package needs with some extras, directly or indirectly."""
    found: dict[str, str] = {}
    pending = [(name, extra) for extra in extras]
    seen = set(pending)
    while pending:
        package, extra = pending.pop()
        for text in distribution(package).requires or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            needed = canonicalize_name(requirement.name)
            try:
                found[needed] = distribution(needed).version
            except PackageNotFoundError:
                raise ReleaseError(f"{package} needs {needed}, which is not installed; run `make setup`") from None
            for each in ("", *requirement.extras):
                if (needed, each) not in seen:
                    seen.add((needed, each))
                    pending.append((needed, each))
    return found


def pinned(constraints: Path) -> dict[str, str]:
    """Return the version of each package in a file of constraints."""
    lines = re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def restricted(document: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return a CycloneDX document with only the packages of these names, and the dependencies between them."""
    components = [each for each in document["components"] if canonicalize_name(each["name"]) in names]
    missing = names - {canonicalize_name(each["name"]) for each in components}
    if missing:
        raise ReleaseError(f"the bill of materials lacks {', '.join(sorted(missing))}")
    references = {each["bom-ref"] for each in components} | {document["metadata"]["component"]["bom-ref"]}
    dependencies = []
    for each in document["dependencies"]:
        if each["ref"] in references:
            needed = [reference for reference in each.get("dependsOn", ()) if reference in references]
            dependencies.append({"ref": each["ref"]} | ({"dependsOn": needed} if needed else {}))
    return {**document, "components": components, "dependencies": dependencies}
