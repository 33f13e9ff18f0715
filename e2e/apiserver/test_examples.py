"""A real API server accepts the examples and all objects rendered from them in strict mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.api.manifest import parse
from stoker_operator.cli.render import render
from stoker_operator.cluster.kube import Kube
from stoker_operator.plan.catalogue import Catalogue

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_accepted(kube: Any, ns: str, example: Path) -> None:
    document = yaml.safe_load(example.read_text())
    document["metadata"]["namespace"] = ns
    server = Kube(kube.api)
    server.apply(document, "kubectl", dry_run=True)
    for child in render(parse(document), Catalogue.load()):
        taken = server.apply(child, "stoker", dry_run=True)
        assert taken["metadata"]["name"] == document["metadata"]["name"], child["kind"]
        assert not changed(child, taken), child["kind"]


def changed(written: Any, stored: Any, path: str = "") -> list[str]:
    """Return where a stored value differs from a written one; a missing empty value does not."""
    if isinstance(written, dict) and isinstance(stored, dict):
        return [each for key, value in written.items() for each in changed(value, stored.get(key), f"{path}.{key}")]
    if isinstance(written, list) and isinstance(stored, list) and len(written) == len(stored):
        pairs = enumerate(zip(written, stored, strict=True))
        return [each for index, (ours, theirs) in pairs for each in changed(ours, theirs, f"{path}[{index}]")]
    return [] if written == stored or (stored is None and not written) else [f"{path}: {written!r} is {stored!r}"]
