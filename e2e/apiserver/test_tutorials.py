"""Runs the tutorials that need an API server and the operator, but no running pods."""

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
    """PATH with stoker, kubectl and helm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl").symlink_to(kube_binary())
    (programs / "helm").symlink_to(helm)
    return f"{programs}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


def test_chart_is_installed_by_the_tutorials_commands(path: str) -> None:
    with ApiServer(controller_manager=False) as bare:
        run(INSTALL, {"KUBECONFIG": str(bare.kubeconfig), "PATH": path})


@pytest.mark.parametrize("tutorial", OTHERS, ids=lambda path: path.stem)
def test_tutorial_shows_the_real_output(
    kube: Any, operator: Any, ns: str, path: str, tutorial: Path, tmp_path: Path
) -> None:
    # The user's kubectl context has its own namespace.
    document = yaml.safe_load(kube.kubeconfig.read_text())
    for each in document["contexts"]:
        each["context"]["namespace"] = ns
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))
    run(tutorial, {"KUBECONFIG": str(kubeconfig), "PATH": path})
