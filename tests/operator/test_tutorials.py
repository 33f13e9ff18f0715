"""Runs the tutorials that need no cluster, and checks the tutorials' claims."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tutorials"))

from tutorial import blocks, lacks, missing_programs, run, tutorials

from stoker_operator.reconcile import diagnosis

ROOT = Path(__file__).parents[2]
EVERY = [each for need in ("nothing", "apiserver", "cluster") for each in tutorials(need)]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("tutorial", tutorials("nothing"), ids=lambda path: path.stem)
def test_tutorial_shows_the_real_output(tutorial: Path) -> None:
    run(tutorial, {"PATH": PATH})


@pytest.mark.parametrize("tutorial", EVERY, ids=lambda path: path.stem)
def test_yaml_of_tutorials_is_valid(tutorial: Path) -> None:
    for block in blocks(tutorial.read_text()):
        if block.kind == "yaml":
            assert list(yaml.safe_load_all(block.text))


def test_missing_output_line_is_found() -> None:
    printed = "NAME  READY\na     True\nb     False\n"
    assert not lacks(printed, "NAME READY\nb … se\n")
    assert lacks(printed, "b False\na True\n") == "a True"
    assert lacks(printed, "c\n") == "c"


def test_missing_programs_are_found(tmp_path: Path) -> None:
    install = ROOT / "docs/tutorials/01-install.md"
    assert missing_programs(install, str(tmp_path)) == ["kubectl", "helm"]
    for name in ("kubectl", "helm"):
        (tmp_path / name).touch(mode=0o755)
    assert missing_programs(install, str(tmp_path)) == []


@pytest.mark.parametrize("name", ["none.md", "README.md"])
def test_runner_refuses_other_files(name: str) -> None:
    folder = ROOT / "docs" / "tutorials"
    done = subprocess.run(
        [sys.executable, folder / "tutorial.py", folder / name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"{name} is not a tutorial; use a file of docs/tutorials" in done.stderr


#: Position of a condition's reason in calls that pass it positionally.
POSITIONS = {"Problem": 0, "Objection": 0, "Diagnosis": 0, "ConditionStatus": 1, "Route": 0, "judge": 3, "Refusal": 2}


def reasons(source: str) -> Iterator[str]:
    """Yield the reasons that a module contains as literals."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        arguments = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
        arguments += call.args[POSITIONS[name] :][:1] if name in POSITIONS else []
        for expression in arguments:
            for node in ast.walk(expression):
                if isinstance(node, ast.Constant) and re.fullmatch("[A-Z][A-Za-z]+", str(node.value)):
                    yield str(node.value)


def test_every_reason_is_explained_in_the_documentation() -> None:
    known_reasons = {"Invalid", *diagnosis._REMEDY}
    shared = ROOT / "engine" / "stoker_engine" / "sizing" / "sharding.py"
    for module in (shared, *(ROOT / "operator" / "stoker_operator").rglob("*.py")):
        known_reasons.update(reasons(module.read_text()))
    (page,) = [each for each in EVERY if "troubleshooting" in each.name]
    rows = re.findall(r"^\| (`[A-Z].*?`) \|", page.read_text(), re.MULTILINE)
    explained = [word for row in rows for word in re.findall(r"`(\w+)`", row)]
    assert sorted(explained) == sorted(known_reasons)
