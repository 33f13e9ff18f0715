"""Properties of all Dockerfiles, checked by their text; `e2e/test_images.py` checks the images."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((*ROOT.glob("images/*/*Dockerfile"), *ROOT.glob("e2e/client/Dockerfile")))


class Instruction(NamedTuple):
    word: str
    rest: str


def stages(file: Path) -> list[list[Instruction]]:
    """Return a Dockerfile's instructions: those before the first FROM, then those of each stage."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    found: list[list[Instruction]] = [[]]
    for line in filter(str.strip, text.replace("\\\n", " ").splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append(Instruction(word, rest.strip()))
    return found


@pytest.fixture(params=DOCKERFILES, ids=lambda file: str(file.relative_to(ROOT)))
def file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_all_dockerfiles_are_found() -> None:
    assert len(DOCKERFILES) == 4


def test_every_stage_comes_from_the_base_or_an_earlier_stage(file: Path) -> None:
    head, *rest = stages(file)
    assert [word for word, _ in head] == ["ARG"]
    assert re.fullmatch(r"BASE=[a-z0-9.:-]+", head[0].rest), (
        "the base names no registry, so that the configured one is used"
    )
    names = {"$BASE"}
    for stage in rest:
        base, _, name = stage[0].rest.partition(" AS ")
        assert base in names
        for word, text in stage:
            if word == "COPY" and (source := re.match(r"--from=(\S+)", text)):
                assert source[1] in names
        names.add(name)


def test_last_stage_runs_as_a_numeric_unprivileged_user(file: Path) -> None:
    last = dict(stages(file)[-1])
    assert last["USER"] == "65532:65532", "a name is refused for pods that must not run as root"


def test_signals_reach_the_program(file: Path) -> None:
    last = dict(stages(file)[-1])
    command = last.get("ENTRYPOINT") or last["CMD"]
    assert isinstance(json.loads(command), list), "a shell as process 1 would not pass SIGTERM on"


def test_last_stage_installs_nothing(file: Path) -> None:
    """Package managers leave logs and caches, which make builds irreproducible."""
    ran = [shlex.split(text)[0] for word, text in stages(file)[-1] if word == "RUN"]
    assert set(ran) <= {"mkdir"}


@pytest.mark.parametrize("name", ["operator", "gateway", "engine"])
def test_images_have_title_description_and_licenses(name: str) -> None:
    last = dict(stages(ROOT / "images" / name / "Dockerfile")[-1])
    labels = dict(part.split("=", 1) for part in shlex.split(last["LABEL"]))
    assert set(labels) == {f"org.opencontainers.image.{key}" for key in ("title", "description", "licenses")}
    assert all(labels.values())
