"""Fixtures of the end-to-end tests: an API server alone, or a cluster with the project's images, its chart, and one
namespace per test.

`pytest e2e` creates what is missing and leaves the cluster running, so that the next run starts quickly;
`e2e/cluster/down` removes it. E2E_KUBECONFIG is the kubeconfig of your own cluster, without Stoker, to use instead; its
nodes must be able to pull the images E2E_IMAGES/operator:TAG and so on (default stoker/operator:dev). KEEP=1 keeps the
tests' objects for inspection. NOBUILD=1 uses the images that the nodes have. NODES is the number of nodes of a new
cluster (`make e2e`: 1, `make e2e-all`: 3). LEVELS=all builds the engine's image for all instruction sets.
`--results FILE` writes the table that is printed at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "cluster")]

from apiserver import ApiServer  # noqa: E402
from kit import chart as release  # noqa: E402
from kit.cluster import Cluster, Images, state_of  # noqa: E402
from kit.namespace import KEEP, fresh  # noqa: E402
from kit.results import Results  # noqa: E402

RESULTS = pytest.StashKey[Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", type=Path, help="write the table of results to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = Results()


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    """Table of the scenarios' measurements."""
    return request.config.stash[RESULTS]


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A real API server with its controllers, without nodes."""
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """A whole cluster: your own, or kind."""
    shell = 'exports=$("$0") && eval "$exports" && echo "$KUBECONFIG" && echo "$PATH"'
    started = subprocess.run(
        ["bash", "-c", shell, HERE / "cluster" / "up"], stdout=subprocess.PIPE, text=True, check=True
    )
    kubeconfig, path = started.stdout.splitlines()
    return Cluster({"KUBECONFIG": kubeconfig, "PATH": path})


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Images:
    """Build the images from this checkout and load them on the nodes; for your own cluster, only return their names."""
    tag = os.environ.setdefault("TAG", "dev")
    where = os.environ.get("E2E_IMAGES", "stoker")
    images = Images(*(f"{where}/{name}:{tag}" for name in ("operator", "engine-cpu", "gateway", "e2e-client")))
    os.environ.setdefault("LEVELS", "host")
    if not {"E2E_KUBECONFIG", "NOBUILD"} & set(os.environ):
        subprocess.run(
            [HERE.parent / "images" / "build", "operator", "engine-cpu", "gateway", "e2e-client"], check=True
        )
        for image in (images.operator, images.engine, images.gateway):
            subprocess.run([HERE / "cluster" / "load-image", image], check=True)
        subprocess.run([HERE / "cluster" / "load-image", "--all", images.client], check=True)
    return images


@pytest.fixture(scope="session")
def chart(cluster: Cluster, images: Images) -> Iterator[None]:
    """The operator, installed by its chart."""
    release.install(cluster, images)
    yield
    if not KEEP:
        release.uninstall(cluster)


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """A new namespace, deleted after the test. If the test fails, its report shows the namespace's contents."""
    with fresh(cluster, request.node.name) as name:
        yield name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fixtures: dict[str, Any] = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "namespace" in fixtures:
        cluster = fixtures["cluster"]
        report.sections.append(("namespace", state_of(cluster, fixtures["namespace"])))
        report.sections.append(("operator", release.operator_logs(cluster)[-20_000:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = config.stash[RESULTS]
    if not results.rows:
        return
    terminalreporter.section("results")
    terminalreporter.write_line(results.table())
    file = config.getoption("results")
    if file:
        words = f"Of {time.strftime('%Y-%m-%d')}, by `make e2e`, on {os.cpu_count()} processors."
        file.write_text(f"# Results of the end-to-end tests\n\n{words}\n\n{results.table()}\n")
