"""The tutorials that need an API server and the operator, and no pods that run, done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import ApiServer, kube_binary

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tutorials"))

from tutorial import run, tutorials

INSTALL, *OTHERS = tutorials("apiserver")


@pytest.fixture
def path(helm: str, tmp_path: Path) -> str:
    """A PATH with stoker, kubectl and helm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl").symlink_to(kube_binary())
    (programs / "helm").symlink_to(helm)
    return f"{programs}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


def test_the_chart_is_installed_as_it_is_told(path: str) -> None:
    with ApiServer(controller_manager=False) as bare:
        run(INSTALL, {"KUBECONFIG": str(bare.kubeconfig), "PATH": path})


@pytest.mark.parametrize("tutorial", OTHERS, ids=lambda path: path.stem)
def test_a_tutorial_is_true(kube: Any, operator: Any, ns: str, path: str, tutorial: Path, tmp_path: Path) -> None:
    # As a user whose kubectl is in a namespace of the user's own.
    document = yaml.safe_load(kube.kubeconfig.read_text())
    for each in document["contexts"]:
        each["context"]["namespace"] = ns
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))
    run(tutorial, {"KUBECONFIG": str(kubeconfig), "PATH": path})
