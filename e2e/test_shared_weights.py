"""Weights on a shared volume: pods that start together download them once, and continue a killed pod's download.

Asserted by the hub's requests: of two pods with one claim, the one that downloads is killed in the middle; the other
continues from there, and both serve. A later pod needs no hub.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit import hub as hubs
from kit.cluster import Cluster, Images, Object
from kit.endpoint import START, Endpoint
from kit.results import Results
from kit.tiny import tiny, tiny_llama
from kit.waiting import wait_for

#: MiB of padding, and the MiB after which its first transfer is held. The download writes 10 MiB at a time.
_PADDING = 48
_HELD_AT = 24
_WRITTEN = 10 * 1024**2
_FOLDER = "/var/lib/stoker-e2e"


@pytest.fixture
def claim(cluster: Cluster, namespace: str) -> Iterator[str]:
    """A claim of a volume that many pods may use, because it lies on one node."""
    selector = "!node-role.kubernetes.io/control-plane"
    node: str = cluster.get("nodes", "-l", selector)["items"][0]["metadata"]["name"]
    folder = f"{_FOLDER}/{namespace}"
    cluster.on_node(node, "mkdir", "-p", folder)
    size = {"storage": "1Gi"}
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]
    common: Object = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeMode": "Filesystem"}
    volume: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace},
        "spec": {
            **common,
            "capacity": size,
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": folder},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        },
    }
    manifest: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights"},
        "spec": {**common, "resources": {"requests": size}, "volumeName": namespace},
    }
    cluster.apply(namespace, volume, manifest)
    yield "weights"
    cluster.on_node(node, "rm", "-rf", folder)
    cluster.kubectl("delete", "persistentvolume", namespace, "--wait=false")


@pytest.mark.further
def test_weights_are_downloaded_once_and_continued_after_a_kill(
    cluster: Cluster,
    images: Images,
    chart: None,
    namespace: str,
    claim: str,
    results: Results,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    in_namespace = ("--namespace", namespace)
    files = tiny_llama(tmp_path_factory.mktemp("model"))
    hub = hubs.start(cluster, namespace, images.client, files, padding=_PADDING, hold_at=_HELD_AT)
    endpoint = Endpoint(cluster, namespace)
    storage = {"cache": {"persistentVolumeClaim": {"claimName": claim}}}
    endpoint.apply(tiny(hub.url, replicas=2, storage=storage))

    def waiting() -> set[str]:
        """Return the pods that wait for another one's download."""
        logs = {
            pod["metadata"]["name"]: cluster.kubectl("logs", pod["metadata"]["name"], *in_namespace, check=False)
            for pod in endpoint.pods()
        }
        return {name for name, log in logs.items() if "another process that downloads org/model" in log}

    wait_for(lambda: len(waiting()) == 1 and hub.fetched(), "one downloads, one waits", START)
    (loading,) = {pod["metadata"]["name"] for pod in endpoint.pods()} - waiting()
    find = "import pathlib; print(*(p.stat().st_size for p in pathlib.Path('/cache').rglob('*.incomplete')))"

    def partly_there() -> bool:  # part of the padding; all other files are complete
        sizes = endpoint.run(loading, find).split()
        return len(sizes) == 1 and int(sizes[0]) >= _WRITTEN

    wait_for(partly_there, "a part of it is there", START)
    cluster.kubectl("delete", "pod", loading, *in_namespace, "--grace-period=0", "--force")

    endpoint.wait_ready()
    wait_for(lambda: len(endpoint.serving()) == 2, "both serve", 60)
    fetched = hub.fetched()
    assert sum(path == "model.safetensors" for path, _ in fetched) == 1
    first, second = [start for path, start in fetched if path == "padding.txt"]
    assert first == 0
    assert second >= _WRITTEN, "it was continued"
    results.add(f"download of {_PADDING} MiB, killed: continued at {second / 1024**2:.0f} MiB by the pod that waited")

    cluster.kubectl("delete", "pod,service", hub.pod, *in_namespace, "--grace-period=1")
    endpoint.patch(engine={"maxNumSeqs": 4})
    endpoint.wait_ready()
