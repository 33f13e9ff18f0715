"""Installation of the operator by its chart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kit.cluster import Cluster, Images

CHART = Path(__file__).resolve().parents[2] / "charts/stoker"
SYSTEM = "stoker-system"
RELEASE = "stoker"


def install(
    cluster: Cluster, images: Images, *values: str, chart: Path = CHART, values_files: Iterable[Path] = ()
) -> None:
    """Install or upgrade the release, with the images under test and `values` of the form ``NAME=VALUE``."""
    all_values = (f"images.operator={images.operator}", f"images.engine.cpu={images.engine}", *values)
    cluster.helm(
        "upgrade", "--install", RELEASE, str(chart),
        "--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "3m",
        *(word for file in values_files for word in ("--values", str(file))),
        *(word for value in all_values for word in ("--set", value)),
    )  # fmt: skip


def uninstall(cluster: Cluster) -> None:
    """Uninstall the release."""
    cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "3m")


def operator_pods(cluster: Cluster) -> list[str]:
    """Return the names of the operator's pods that are not terminating."""
    selector = ("-l", "app.kubernetes.io/name=stoker-operator", "--namespace", SYSTEM)
    items = cluster.get("pods", *selector)["items"]
    return [pod["metadata"]["name"] for pod in items if "deletionTimestamp" not in pod["metadata"]]


def operator_logs(cluster: Cluster) -> str:
    """Return the logs of the operator's pods."""
    return "\n".join(cluster.kubectl("logs", "--namespace", SYSTEM, pod, check=False) for pod in operator_pods(cluster))
