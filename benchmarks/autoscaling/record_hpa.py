"""Record decisions of Kubernetes' HPA controller: a trace to test the model in `hpa.py` against.

The API server and the controller are real. This program serves curves as metrics (`external.metrics.k8s.io`). The scale
targets are custom resources with a scale subresource, whose status follows their spec. Each read of a metric is one
sync of the controller.

    python benchmarks/autoscaling/record_hpa.py
"""

from __future__ import annotations

import argparse
import json
import math
import random
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import kubernetes

REPOSITORY: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "e2e" / "cluster"))

from apiserver import ApiServer  # noqa: E402

TRACE: Final = REPOSITORY / "tests" / "operator" / "scaling" / "hpa_trace.json"
#: The controller's sync period. The policies' periods are no multiples of it: decisions do not depend on milliseconds.
SYNC_SECONDS: Final = 3.5
#: The controller's downscale stabilization; the default of 300 s would make the trace long.
WINDOW_SECONDS: Final = 100
SECONDS: Final = 220.0
TARGET: Final = 10
GROUP, VERSION, PLURAL = "benchmarks.example.com", "v1", "targets"
METRICS: Final = "external.metrics.k8s.io"
NAMESPACE: Final = "default"
FEATURES: Final = "HPAScaleToZero=true,HPAConfigurableTolerance=true"


def steps(*values: tuple[float, int]) -> Callable[[float], int]:
    """Return a curve of steps, given as (first second, value)."""
    return lambda now: next(value for start, value in reversed(values) if now >= start)


def noise(low: int, high: int, seed: int) -> Callable[[float], int]:
    """Return a value that changes randomly every 5 s."""
    return lambda now: random.Random(f"{seed} {int(now // 5)}").randint(low, high)


@dataclass
class Case:
    """An HPA, its metric and the recorded syncs.

    Attributes:
        behavior: as in a manifest; None omits it.
        syncs: seconds since the first sync, sum of the metric, and replicas in the target's spec and status.
    """

    lowest: int
    highest: int
    behavior: dict[str, Any] | None
    curve: Callable[[float], int]
    syncs: list[tuple[float, int, int, int]] = field(default_factory=list)
    start: float | None = None


CASES: Final = {
    "default": Case(1, 40, {}, steps((0, 5), (10, 330), (75, 90), (195, 10))),
    "no-behavior": Case(1, 40, None, steps((0, 5), (10, 330), (75, 90), (195, 10))),
    "policies": Case(
        1,
        30,
        {
            "scaleUp": {
                "policies": [
                    {"type": "Pods", "value": 2, "periodSeconds": 10},
                    {"type": "Percent", "value": 50, "periodSeconds": 16},
                ]
            },
            "scaleDown": {
                "stabilizationWindowSeconds": 20,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": 8}],
            },
        },
        lambda now: int(150 - 140 * math.cos(now * 2 * math.pi / 150)),
    ),
    "least-policy": Case(
        2,
        25,
        {
            "scaleUp": {
                "stabilizationWindowSeconds": 12,
                "selectPolicy": "Min",
                "policies": [
                    {"type": "Pods", "value": 3, "periodSeconds": 9},
                    {"type": "Percent", "value": 30, "periodSeconds": 13},
                ],
            },
            "scaleDown": {
                "stabilizationWindowSeconds": 6,
                "selectPolicy": "Min",
                "policies": [
                    {"type": "Pods", "value": 4, "periodSeconds": 12},
                    {"type": "Percent", "value": 20, "periodSeconds": 5},
                ],
            },
        },
        noise(0, 300, 1),
    ),
    "only-up": Case(1, 30, {"scaleDown": {"selectPolicy": "Disabled"}}, noise(0, 200, 2)),
    "tolerance": Case(
        1,
        30,
        {"scaleUp": {"tolerance": "0.3"}, "scaleDown": {"tolerance": "0.05", "stabilizationWindowSeconds": 5}},
        lambda now: int(100 - 80 * math.cos(now * 2 * math.pi / 200)),
    ),
    "to-zero": Case(
        0,
        10,
        {"scaleDown": {"stabilizationWindowSeconds": 12}},
        lambda now: 35 if now % 60 < 25 else 0,
    ),
}


class Recorder:
    """The metrics server, and the controller of the targets."""

    def __init__(self, objects: Any) -> None:
        self.objects = objects
        self.lock = threading.Lock()

    def get(self, name: str) -> Any:
        """Read a target."""
        return self.objects.get_namespaced_custom_object(GROUP, VERSION, NAMESPACE, PLURAL, name)

    def sync(self, name: str) -> int:
        """Record a sync; return the metric's value for it."""
        case = CASES[name]
        with self.lock:
            now = time.monotonic()
            case.start = case.start or now
            value = case.curve(now - case.start)
            seen = self.get(name)
            replicas = seen["spec"]["replicas"], seen["status"]["replicas"]
            case.syncs.append((round(now - case.start, 3), value, *replicas))
        return value

    def follow(self) -> None:
        """Set each target's status to its spec."""
        with self.lock:
            listed = self.objects.list_namespaced_custom_object(GROUP, VERSION, NAMESPACE, PLURAL)
            for seen in listed["items"]:
                replicas = seen["spec"]["replicas"]
                if seen.get("status", {}).get("replicas") != replicas:
                    status = {"replicas": replicas, "selector": "target=" + seen["metadata"]["name"]}
                    self.objects.patch_namespaced_custom_object_status(
                        GROUP, VERSION, NAMESPACE, PLURAL, seen["metadata"]["name"], {"status": status}
                    )

    def serve(self, certificate: Path, key: Path) -> int:
        """Serve the metrics on a port of the loopback interface; return the port."""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0].strip("/").split("/")
                answer: dict[str, Any] = {"kind": "APIResourceList", "apiVersion": "v1", "resources": []}
                answer["groupVersion"] = f"{METRICS}/v1beta1"
                if len(path) == 6:
                    item: dict[str, Any] = {
                        "metricName": path[5],
                        "metricLabels": {},
                        "value": str(recorder.sync(path[5])),
                    }
                    item["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    answer = {"kind": "ExternalMetricValueList", "apiVersion": f"{METRICS}/v1beta1"}
                    answer |= {"metadata": {}, "items": [item]}
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: each sync would be a line."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return int(server.server_address[1])


def create_definition() -> None:
    """Create the targets' CRD, and wait until it is established."""
    count = {"type": "object", "properties": {"replicas": {"type": "integer"}, "selector": {"type": "string"}}}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": count, "status": count}}},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
    }
    definitions: Any = kubernetes.client.ApiextensionsV1Api()
    name = f"{PLURAL}.{GROUP}"
    names = {"plural": PLURAL, "singular": "target", "kind": "Target"}
    definitions.create_custom_resource_definition(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": name},
            "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
        }
    )
    while not any(
        condition.type == "Established" and condition.status == "True"
        for condition in definitions.read_custom_resource_definition(name).status.conditions or ()
    ):
        time.sleep(0.2)


def register(port: int) -> None:
    """Register the metrics server with the API server, by ExternalName: it listens on loopback only."""
    core: Any = kubernetes.client.CoreV1Api()
    core.create_namespaced_service(
        NAMESPACE,
        {
            "metadata": {"name": "metrics"},
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
        },
    )
    registrations: Any = kubernetes.client.ApiregistrationV1Api()
    registrations.create_api_service(
        {
            "metadata": {"name": f"v1beta1.{METRICS}"},
            "spec": {
                "group": METRICS,
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {"namespace": NAMESPACE, "name": "metrics", "port": port},
            },
        }
    )


def create_autoscaler(objects: Any, name: str, case: Case) -> dict[str, Any] | None:
    """Create an HPA; return its behavior with the API server's defaults."""
    spec: dict[str, Any] = {
        "scaleTargetRef": {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Target", "name": name},
        "minReplicas": case.lowest,
        "maxReplicas": case.highest,
        "metrics": [
            {
                "type": "External",
                "external": {
                    "metric": {"name": name},
                    "target": {"type": "AverageValue", "averageValue": str(TARGET)},
                },
            }
        ],
    }
    if case.behavior is not None:
        spec["behavior"] = case.behavior
    created = objects.create_namespaced_custom_object(
        "autoscaling", "v2", NAMESPACE, "horizontalpodautoscalers", {"metadata": {"name": name}, "spec": spec}
    )
    behavior: dict[str, Any] | None = created["spec"].get("behavior")
    return behavior


def quantity(text: str) -> float:
    """Parse a tolerance as the API server writes it: `50m` is 0.05."""
    return int(text[:-1]) / 1000 if text.endswith("m") else float(text)


def record(seconds: float) -> dict[str, Any]:
    """Record all cases concurrently."""
    options = {
        "kube-apiserver": [f"--feature-gates={FEATURES}"],
        "kube-controller-manager": [
            "--controllers=horizontal-pod-autoscaler-controller",
            f"--horizontal-pod-autoscaler-sync-period={SYNC_SECONDS}s",
            f"--horizontal-pod-autoscaler-downscale-stabilization={WINDOW_SECONDS}s",
            f"--feature-gates={FEATURES}",
        ],
    }
    with ApiServer(options=options) as server:
        kubernetes.config.load_kube_config(str(server.kubeconfig))  # type: ignore[no-untyped-call]
        objects: Any = kubernetes.client.CustomObjectsApi()
        recorder = Recorder(objects)
        create_definition()
        register(recorder.serve(server.folder / "pki" / "apiserver.crt", server.folder / "pki" / "apiserver.key"))
        behaviors = {}
        for name, case in CASES.items():
            target: dict[str, Any] = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Target", "metadata": {"name": name}}
            target["spec"] = {"replicas": max(1, case.lowest)}
            objects.create_namespaced_custom_object(GROUP, VERSION, NAMESPACE, PLURAL, target)
        recorder.follow()
        for name, case in CASES.items():
            behavior = create_autoscaler(objects, name, case)
            for rules in (behavior or {}).values():
                rules["tolerance"] = quantity(rules.get("tolerance", "100m"))
                rules.setdefault("stabilizationWindowSeconds", WINDOW_SECONDS)
            behaviors[name] = behavior
        deadline = time.monotonic() + 120
        while not all(case.syncs and case.syncs[-1][0] >= seconds for case in CASES.values()):
            if any(not case.syncs for case in CASES.values()) and time.monotonic() > deadline:
                raise SystemExit(
                    "The controller did not read all metrics.\n" + server._log_tail("kube-controller-manager")
                )
            recorder.follow()
            time.sleep(0.25)
        version = kubernetes.client.VersionApi().get_code().git_version
    return {
        "kubernetes": version,
        "sync_seconds": SYNC_SECONDS,
        "downscale_stabilization_seconds": WINDOW_SECONDS,
        "feature_gates": FEATURES,
        "target": TARGET,
        "columns": ["seconds", "metric", "spec.replicas", "status.replicas"],
        "cases": {
            name: {
                "lowest": case.lowest,
                "highest": case.highest,
                "behavior": behaviors[name],
                "syncs": case.syncs,
            }
            for name, case in CASES.items()
        },
    }


def compact(trace: dict[str, Any]) -> str:
    """Return JSON with one line per sync."""
    marks = {}
    for number, case in enumerate(trace["cases"].values()):
        marks[f'"@{number}"'] = ",\n    ".join(json.dumps(sync) for sync in case["syncs"])
        case["syncs"] = [f"@{number}"]
    text = json.dumps(trace, indent=1)
    for mark, lines in marks.items():
        text = text.replace(mark, lines)
    return text + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a trace of Kubernetes' HPA controller.")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="duration of each metric's curve (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=TRACE, help="file of the trace (default: %(default)s)")
    options = parser.parse_args()
    options.output.write_text(compact(record(options.seconds)))


if __name__ == "__main__":
    main()
