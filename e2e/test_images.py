"""The images: builds are reproducible, each contains only its part, runs unprivileged on a read-only file system, and
ends on SIGTERM as process 1.

These tests use only Docker; the other tests run the images in pods of the cluster.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.endpoint import START
from kit.waiting import wait_for

ROOT = Path(__file__).parents[1]
TAG = os.environ.get("TAG", "dev")
OPERATOR, ENGINE = f"stoker/operator:{TAG}", f"stoker/engine-cpu:{TAG}"
BOTH = pytest.mark.parametrize("image", [OPERATOR, ENGINE])

#: Arguments of a pod with the demo model, with little memory.
SERVE = ("serve", "demo://gemma-3-270m", "--max-model-len=128", "--num-gpu-blocks-override=64")
SIGTERM_BIT = 1 << 14

FIND = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name)])"
HEALTHY = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"


class Docker:
    """The Docker daemon that built the images."""

    def __init__(self) -> None:
        shell = '. "$0" && use_docker >&2 && exec python3 -c "import json, os; print(json.dumps(dict(os.environ)))"'
        printed = subprocess.run(
            ["bash", "-c", shell, ROOT / "e2e/cluster/common.sh"], stdout=subprocess.PIPE, text=True, check=True
        )
        self.environment: dict[str, str] = json.loads(printed.stdout)

    def __call__(self, *arguments: str, stdin: str = "", status: int | None = 0) -> str:
        """Run `docker ARGUMENTS` and return its output; the test fails unless it exits with `status` (None: any)."""
        return self.run("docker", *arguments, stdin=stdin, status=status)

    def works(self, *arguments: str) -> bool:
        """Return whether `docker ARGUMENTS` succeeds."""
        return not subprocess.run(("docker", *arguments), env=self.environment, capture_output=True).returncode

    def run(self, *command: str, stdin: str = "", status: int | None = 0, **environment: str) -> str:
        """Run a command that uses this Docker, and return its output."""
        done = subprocess.run(
            command,
            input=stdin,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if status is not None and done.returncode != status:
            pytest.fail(f"{' '.join(command)} exited with {done.returncode}, not {status}:\n{done.stdout}")
        return done.stdout


@pytest.fixture(scope="module")
def docker() -> Docker:
    if "E2E_KUBECONFIG" in os.environ:
        pytest.skip("the images of a cluster of your own are yours to build")
    docker = Docker()
    os.environ.setdefault("LEVELS", "host")
    if "NOBUILD" not in os.environ:
        docker.run(str(ROOT / "images/build"), "operator", "engine-cpu")
    return docker


@pytest.fixture
def engine(docker: Docker) -> Iterator[str]:
    """A container that starts to serve the demo model, without network; only /cache and /dev/shm are writable."""
    name = f"stoker-engine-{uuid.uuid4().hex[:6]}"
    docker("run", "--detach", "--name", name, "--read-only", "--network=none", "--shm-size=256m", ENGINE, *SERVE)
    yield name
    docker("rm", "--force", "--volumes", name)


@pytest.mark.further
def test_second_build_has_the_same_files(docker: Docker) -> None:
    before = _dangling(docker)
    docker.run(str(ROOT / "images/build"), "operator", NO_CACHE="1", TAG="again")
    try:
        docker.run(str(ROOT / "images/compare.py"), OPERATOR, "stoker/operator:again")
    finally:
        docker("rmi", "stoker/operator:again")
        # The stages too: otherwise the next build would start from them, the newest, and find no cached layers.
        if stages := _dangling(docker) - before:
            docker("rmi", *stages, status=None)


def _dangling(docker: Docker) -> set[str]:
    return set(docker("images", "--quiet", "--filter", "dangling=true").split())


@BOTH
def test_image_metadata_states_user_entrypoint_and_labels(docker: Docker, image: str) -> None:
    (found,) = json.loads(docker("inspect", image))
    config: dict[str, Any] = found["Config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["stoker"]
    assert list(config["Volumes"]) == ["/cache"]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (labels["version"], labels["licenses"]) == (project["version"], project["license"])
    assert labels["title"].startswith("stoker ")
    assert labels["description"]
    if (ROOT / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}(-dirty)?", labels["revision"])
        assert re.match(r"20\d\d-\d\d-\d\dT", labels["created"])


@pytest.mark.parametrize(
    ("image", "has", "lacks"),
    [(OPERATOR, "kopf", {"torch", "transformers"}), (ENGINE, "torch", {"kopf", "kubernetes"})],
)
def test_image_contains_only_its_package(docker: Docker, image: str, has: str, lacks: set[str]) -> None:
    found = docker("run", "--rm", "--entrypoint=python", image, "-c", FIND, has, "pip", *lacks)
    assert found.split() == [has]  # no pip either: nothing is installed at run time


@BOTH
def test_images_user_cannot_change_its_files(docker: Docker, image: str) -> None:
    # Errors about unreadable folders go to stderr, which would be mixed into the output.
    find = "find / -xdev -writable -not -type l 2>/dev/null"
    writable_paths = docker("run", "--rm", "--entrypoint=sh", image, "-c", find, status=None).splitlines()
    assert {path for path in writable_paths if not path.startswith(("/cache", "/dev"))} <= {
        "/tmp",
        "/var/tmp",
        "/run/lock",
    }


def test_operator_runs_on_a_read_only_file_system(docker: Docker) -> None:
    sandbox = ("run", "--rm", "--interactive", "--read-only", "--network=none", "--cap-drop=ALL", OPERATOR)
    plan = docker(*sandbox, "plan", "-f", "/dev/stdin", stdin=(ROOT / "examples/02-four-gpus.yaml").read_text())
    assert "nvidia" in plan
    output = docker(*sandbox, status=1)  # no writable folder
    assert output.splitlines()[-1].startswith("stoker operator: no cluster")
    assert "Traceback" not in output


@pytest.mark.timeout(600)
def test_engine_ends_on_sigterm(docker: Docker, engine: str) -> None:
    def serves() -> bool:
        if not _runs(docker, engine):
            pytest.fail(docker("logs", engine))
        return docker.works("exec", engine, "python", "-c", HEALTHY)

    wait_for(serves, "the engine serves", START)
    _ends(docker, engine)


@pytest.mark.further
@pytest.mark.timeout(600)
def test_engine_ends_on_sigterm_during_its_start(docker: Docker, engine: str) -> None:
    # Until a program has installed a handler, process 1 ignores SIGTERM.
    def taken_up() -> bool:
        status = docker("exec", engine, "cat", "/proc/1/status", status=None)
        caught = re.search(r"SigCgt:\s*(\w+)", status)
        return bool(caught and int(caught[1], 16) & SIGTERM_BIT)

    wait_for(taken_up, "the engine handles SIGTERM", START)
    _ends(docker, engine)


def _ends(docker: Docker, container: str) -> None:
    docker("kill", "--signal=TERM", container)
    wait_for(lambda: not _runs(docker, container), "it ends by itself", START, every=0.2)
    log = docker("logs", container)
    assert docker("inspect", "--format={{.State.ExitCode}}", container).strip() == "0", log
    assert "Traceback" not in log


def _runs(docker: Docker, container: str) -> bool:
    return docker("inspect", "--format={{.State.Running}}", container).strip() == "true"
