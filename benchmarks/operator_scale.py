"""Measure the operator with many endpoints on a real API server without nodes: latency, requests when idle, memory.

    python benchmarks/operator_scale.py [--endpoints 1000] [--output FILE]

The operator runs with the chart's RBAC and flags, including webhook and Lease. The API server's audit log counts its
requests. Endpoints have no replicas, so that the built-in controllers have no work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import yaml
from kubernetes import client, config
from machine import cpu_name
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "e2e" / "cluster"))

from apiserver import ApiServer, free_ports  # noqa: E402

SYSTEM, NAMESPACE = "stoker-system", "scale"
RESOURCE = ("stoker.dev", "v1alpha1", NAMESPACE, "inferenceendpoints")
HOUR = 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoints", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=200, help="specs to change, one after another")
    parser.add_argument("--reviews", type=int, default=1000, help="reviews to send to the webhook")
    parser.add_argument(
        "--quiet-seconds", type=int, default=180, help="how long to count requests while nothing changes"
    )
    parser.add_argument("--output", type=Path, help="also write the report (Markdown) to this file")
    options = parser.parse_args()
    with ApiServer() as server, tempfile.TemporaryDirectory() as folder:
        report = Measurement(server, Path(folder), options).run()
    print(report)
    if options.output:
        options.output.write_text(report)


class Measurement:
    """One run of the benchmark."""

    def __init__(self, server: ApiServer, folder: Path, options: argparse.Namespace) -> None:
        self.server, self.folder, self.options = server, folder, options
        self.api: Any = config.new_client_from_config(str(server.kubeconfig))  # type: ignore[no-untyped-call]
        self.custom: Any = client.CustomObjectsApi(self.api)
        self.core: Any = client.CoreV1Api(self.api)
        self.health, self.webhook = free_ports(2)
        self.operator: subprocess.Popen[bytes] | None = None

    def run(self) -> str:
        """Run all measurements, and return the report."""
        rows: list[tuple[str, str]] = []
        self.install()
        self.start()
        count = self.options.endpoints

        began = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            list(tqdm(pool.map(self.create, range(count)), total=count, desc="created", unit=" endpoints"))
        created = time.monotonic() - began
        self.wait(lambda: self.settled() == count, "all endpoints are settled", count, self.settled)
        rows.append((f"{count:,} endpoints created", f"{created:.0f} s"))
        rows.append(
            (
                "all of them converged (Service, Deployment … applied, status reported)",
                f"{time.monotonic() - began:.0f} s",
            )
        )
        rows.append(("memory of the operator (RSS)", f"{self.rss() >> 20} MiB"))

        seconds = self.changes()
        rows.append((f"spec changed → Deployment changed, p50 / p99 of {len(seconds)}", quantiles(seconds)))
        self.wait(lambda: self.settled() == count, "all endpoints are settled again", count, self.settled)
        seconds = self.reviews()
        rows.append((f"webhook latency, p50 / p99 of {len(seconds)}", quantiles(seconds)))

        self.stop()
        before = len(self.server.requests())
        began = time.monotonic()
        self.start()
        rows.append(("restart until ready (everything listed)", f"{time.monotonic() - began:.1f} s"))
        time.sleep(30)
        since = self.server.requests()[before:]
        writes = Counter(verb_and_resource(each) for each in since if each["verb"] in WRITES)
        leases = sum(number for (_, resource), number in writes.items() if resource == "leases")
        rows.append(("writes in the 30 s after a restart, but for the Lease's", str(sum(writes.values()) - leases)))
        rows.append(("memory of the restarted operator (RSS)", f"{self.rss() >> 20} MiB"))

        before = len(self.server.requests())
        for _ in tqdm(range(self.options.quiet_seconds), desc="idle", unit=" s"):
            time.sleep(1)
        quiet = Counter(verb_and_resource(each) for each in self.server.requests()[before:])
        scale = HOUR / self.options.quiet_seconds
        lease = sum(number for (_, resource), number in quiet.items() if resource == "leases")
        other_requests = sum(quiet.values()) - lease
        rows.append(("requests per hour while nothing changes: for the Lease", f"{lease * scale:,.0f}"))
        rows.append(("… and all others (renewed watches, certificate checks)", f"{other_requests * scale:,.0f}"))
        self.stop()
        log = (self.folder / "operator.log").read_text()
        rows.append(("tracebacks in its log", str(log.count("Traceback"))))
        table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
        machine = f"{cpu_name()}, {os.cpu_count()} CPUs, Python {platform.python_version()}; Kubernetes 1.37"
        beside = "etcd, API server and controllers run on the same machine"
        return f"# The operator with {count:,} endpoints\n\n{machine}; {beside}.\n\n{table}\n"

    def install(self) -> None:
        """Render the chart into the cluster, and create a kubeconfig for its service account."""
        built = subprocess.run([ROOT / "e2e/cluster/build", "helm"], stdout=subprocess.PIPE, text=True, check=True)
        command = [built.stdout.strip(), "install", "stoker", str(ROOT / "charts/stoker"), f"--namespace={SYSTEM}"]
        environment = {**os.environ, "KUBECONFIG": str(self.server.kubeconfig)}
        subprocess.run([*command, "--create-namespace"], env=environment, check=True, stdout=subprocess.DEVNULL)
        self.core.create_namespace({"metadata": {"name": NAMESPACE}})
        token = self.core.create_namespaced_service_account_token(
            "stoker", SYSTEM, {"spec": {"expirationSeconds": 7200}}
        )
        document = yaml.safe_load(self.server.kubeconfig.read_text())
        document["users"] = [
            {"name": each["name"], "user": {"token": token.status.token}} for each in document["users"]
        ]
        (self.folder / "operator.conf").write_text(yaml.safe_dump(document))

    def start(self) -> None:
        """Start the operator and wait until it is ready."""
        command = [
            sys.executable, "-m", "stoker", "operator", f"--health-address=127.0.0.1:{self.health}",
            f"--operator-namespace={SYSTEM}", "--leader-elect", f"--webhook-address=127.0.0.1:{self.webhook}",
            "--webhook-secret=stoker-webhook", "--webhook-host=localhost", "--webhook-configuration=stoker",
        ]  # fmt: skip
        with (self.folder / "operator.log").open("ab") as log:
            environment = {**os.environ, "KUBECONFIG": str(self.folder / "operator.conf")}
            self.operator = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.wait(self.ready, "the operator is ready")

    def stop(self) -> None:
        """Stop the operator as Kubernetes does."""
        assert self.operator
        self.operator.terminate()
        self.operator.wait(timeout=60)

    def ready(self) -> bool:
        """Return whether `/readyz` answers."""
        assert self.operator
        if self.operator.poll() is not None:
            raise SystemExit((self.folder / "operator.log").read_text())
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{self.health}/readyz", timeout=5):
                return True
        except OSError:
            return False

    def create(self, number: int) -> None:
        """Create an endpoint."""
        self.custom.create_namespaced_custom_object(*RESOURCE[:3], RESOURCE[3], endpoint(number))

    def settled(self) -> int:
        """Return the number of Ready endpoints by the operator's metrics."""
        text = self.text()
        marker = 'stoker_operator_endpoints{condition="Ready",status="True"} '
        return int(float(text.partition(marker)[2].partition("\n")[0] or 0))

    def text(self) -> str:
        """Return the operator's metrics."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.health}/metrics", timeout=30) as answer:
            found: str = answer.read().decode()
        return found

    def rss(self) -> int:
        """Return the operator's resident memory in bytes."""
        assert self.operator
        resident: int = psutil.Process(self.operator.pid).memory_info().rss
        return resident

    def changes(self) -> list[float]:
        """Change specs one after another; return the seconds until each Deployment is updated."""
        apps: Any = client.AppsV1Api(self.api)
        seconds = []
        for number in tqdm(range(self.options.changes), desc="changed", unit=" endpoints"):
            name = f"endpoint-{number}"
            began = time.monotonic()
            self.custom.patch_namespaced_custom_object(
                *RESOURCE, name, {"spec": {"engine": {"maxNumSeqs": 7}}}, _content_type="application/merge-patch+json"
            )
            while "--max-num-seqs=7" not in container(apps.read_namespaced_deployment(name, NAMESPACE)).args:
                time.sleep(0.01)
            seconds.append(time.monotonic() - began)
        return seconds

    def reviews(self) -> list[float]:
        """Send reviews to the webhook on one connection; return the seconds to each response."""
        import http.client
        import ssl

        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", self.webhook, context=context, timeout=10)
        seconds = []
        for number in tqdm(range(self.options.reviews), desc="reviewed", unit=" reviews"):
            review = {
                "apiVersion": "admission.k8s.io/v1",
                "kind": "AdmissionReview",
                "request": {
                    "uid": str(number),
                    "operation": "CREATE",
                    "resource": {"group": "stoker.dev", "version": "v1alpha1", "resource": "inferenceendpoints"},
                    "object": endpoint(number),
                },
            }
            began = time.monotonic()
            connection.request("POST", "/validate", json.dumps(review), {"Content-Type": "application/json"})
            answer = json.load(connection.getresponse())
            seconds.append(time.monotonic() - began)
            assert answer["response"]["allowed"], answer
        return seconds

    def wait(
        self, look: Callable[[], Any], condition: str, total: int = 0, done: Callable[[], int] | None = None
    ) -> None:
        """Wait until `look` returns true, and show the progress."""
        deadline = time.monotonic() + 900
        with tqdm(total=total or None, desc=condition, disable=not total) as bar:
            while not look():
                if time.monotonic() > deadline:
                    raise SystemExit(f"not within 900 s: {condition}")
                if done:
                    bar.update(done() - bar.n)
                time.sleep(0.25)
            bar.update(total - bar.n)


WRITES = ("create", "update", "patch", "delete")


def endpoint(number: int) -> dict[str, Any]:
    """Return an endpoint's manifest."""
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceEndpoint",
        "metadata": {"name": f"endpoint-{number}", "namespace": NAMESPACE},
        "spec": {
            "replicas": 0,
            "model": {"source": "demo://gemma-3-270m"},
            "hardware": {"accelerator": "cpu", "resources": {"limits": {"cpu": "4", "memory": "8Gi"}}},
        },
    }


def container(deployment: Any) -> Any:
    """Return the engine container."""
    return deployment.spec.template.spec.containers[0]


def verb_and_resource(event: dict[str, Any]) -> tuple[str, str]:
    """Return verb and resource of an audit event."""
    return event["verb"], event.get("objectRef", {}).get("resource", event["requestURI"])


def quantiles(seconds: list[float]) -> str:
    """Return p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"{cuts[49] * 1000:.0f} / {cuts[98] * 1000:.0f} ms"


if __name__ == "__main__":
    main()
