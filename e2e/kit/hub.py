"""A model hub in a pod of the cluster: the fake hub of the engine's tests (tests/engine/models/fake_hub.py)."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kit.cluster import Cluster, Object
from kit.traffic import client_pod
from kit.waiting import wait_for

_PROGRAM = Path(__file__).resolve().parents[2] / "tests/engine/models/fake_hub.py"
_PORT = 8080

#: Arguments: `token`, `padding` and `hold_at` of `start`; a size of 0 means no padding, or that no transfer is held.
_SERVE = f"""
import json, pathlib, random, signal, sys, time
sys.path.insert(0, "/hub/program")
from fake_hub import FakeHub
files = {{path.name: path.read_bytes() for path in pathlib.Path("/hub/files").iterdir() if path.is_file()}}
if padding := int(sys.argv[2]):
    files["padding.txt"] = random.Random(0).randbytes(padding * 1024**2)
hub = FakeHub(files, ("0.0.0.0", {_PORT}), token=sys.argv[1])
if hold_at := int(sys.argv[3]):
    hub.hold_at = hold_at * 1024**2
print("serving", sorted(files), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
num_printed = 0
while True:
    for fetched in hub.fetched[num_printed:]:
        print(json.dumps(fetched), flush=True)
        num_printed += 1
    time.sleep(0.2)
"""


@dataclass(frozen=True)
class Hub:
    """A hub with one model, ``org/model``.

    Attributes:
        url: value of HF_ENDPOINT.
    """

    url: str
    cluster: Cluster
    namespace: str
    pod: str

    def fetched(self) -> list[tuple[str, int]]:
        """Return path and offset of the first byte of each file request."""
        log = self.cluster.kubectl("logs", self.pod, "--namespace", self.namespace)
        return [tuple(json.loads(line)) for line in log.strip("\n").split("\n") if line.startswith("[")]


def start(
    cluster: Cluster,
    namespace: str,
    image: str,
    files: Mapping[str, bytes],
    token: str = "",
    *,
    padding: int = 0,
    hold_at: int = 0,
) -> Hub:
    """Start a hub.

    Args:
        image: image with Python.
        files: the model's files, less than a megabyte in total.
        token: token with read access; empty for public access.
        padding: size in MiB of a further file, padding.txt, which no engine reads.
        hold_at: MiB after which the first transfer of each file only trickles until its connection ends.
    """
    name = "hub-private" if token else "hub"
    pod = client_pod(name, image, ["python", "-c", _SERVE, token, str(padding), str(hold_at)])
    pod["metadata"]["labels"] = {"app": name}
    pod["spec"]["volumes"] = [
        {"name": "program", "configMap": {"name": name}},
        {"name": "files", "configMap": {"name": f"{name}-files"}},
    ]
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "program", "mountPath": "/hub/program"},
        {"name": "files", "mountPath": "/hub/files"},
    ]
    program: Object = {"kind": "ConfigMap", "data": {"fake_hub.py": _PROGRAM.read_text()}}
    content: Object = {
        "kind": "ConfigMap",
        "binaryData": {path: base64.b64encode(data).decode() for path, data in files.items()},
    }
    service: Object = {"kind": "Service", "spec": {"selector": {"app": name}, "ports": [{"port": _PORT}]}}
    for document, its_name in ((program, name), (content, f"{name}-files"), (service, name)):
        document |= {"apiVersion": "v1", "metadata": {"name": its_name}}
        cluster.apply(namespace, document)
    cluster.apply(namespace, pod)

    def serves() -> bool:
        return "serving" in cluster.kubectl("logs", name, "--namespace", namespace, check=False)

    wait_for(serves, f"{name} serves", 120)
    return Hub(f"http://{name}.{namespace}.svc:{_PORT}", cluster, namespace, name)
