"""A real Kubernetes API server without a cluster: etcd, API server, controller manager as plain processes.

What envtest is for Go. There are no nodes, so nothing runs and no pod gets an IP, but all that the API server
and its controllers do is real: schemas and CEL rules, server-side apply, RBAC, owner references and their
garbage collection, Deployments that make ReplicaSets that make Pods. Ready in a few seconds.

    with ApiServer() as server:
        kubernetes.config.load_kube_config(str(server.kubeconfig))

By hand: ``python e2e/cluster/apiserver.py`` prints the line to export and stays until Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
SERVICE_RANGE = "10.96.0.0/16"
# Requests of service accounts: of the operator, that is. The controllers run as the administrator.
AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
"""


class ApiServerError(RuntimeError):
    """A component did not start; the message ends with what it logged last."""


def kube_binary() -> Path:
    """The all-in-one Kubernetes program; built first if this machine does not have it (minutes, once)."""
    built = subprocess.run([HERE / "build", "kube"], stdout=subprocess.PIPE, text=True)
    if built.returncode:
        raise ApiServerError(f"{HERE / 'build'} kube failed; what it said stands above")
    return Path(built.stdout.strip())


class ApiServer:
    """A context manager, or `start` and `stop`. `kubeconfig` is a cluster administrator's.

    `options` are more options of a component, by its name; of two that are equal, a component takes the last.
    """

    def __init__(
        self,
        *,
        controller_manager: bool = True,
        kube: Path | None = None,
        options: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.controller_manager = controller_manager
        self.options = options or {}
        self.kube = kube
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ApiServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        kube = self.kube or kube_binary()
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-apiserver-"))
        # A component is chosen by the name it is called by.
        for name in ("kubeadm", "etcd", "kube-apiserver", "kube-controller-manager"):
            (self.folder / name).symlink_to(kube)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        etcd, etcd_peer, port = free_ports(3)
        self.url = f"https://127.0.0.1:{port}"
        self.kubeconfig = self.folder / "super-admin.conf"
        self._make_credentials(port)
        pki = self.folder / "pki"
        (self.folder / "audit.yaml").write_text(AUDIT_POLICY)
        self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd-data'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{etcd_peer}",
            "--unsafe-no-fsync",  # the data is thrown away with the server
        )
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            # The `kubernetes` Service cannot point at loopback, and nothing here would use it.
            "--endpoint-reconciler-type=none",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=RBAC",
            "--allow-privileged",
            f"--audit-policy-file={self.folder / 'audit.yaml'}",
            f"--audit-log-path={self.folder / 'audit.log'}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        )
        self._wait("kube-apiserver", f"{self.url}/readyz")
        if self.controller_manager:
            (manager_port,) = free_ports(1)  # only now, since a free port may not stay so
            self._spawn(
                "kube-controller-manager",
                # As the administrator: with an account for each controller they take 10 s to start.
                f"--kubeconfig={self.kubeconfig}",
                "--bind-address=127.0.0.1",
                f"--secure-port={manager_port}",
                "--leader-elect=false",
                # Its usual 20 requests a second are five Deployments a second.
                "--kube-api-qps=1000",
                "--kube-api-burst=1000",
                "--controllers=*,-node-ipam-controller",  # no nodes, and no range to give them pods from
                f"--root-ca-file={pki / 'ca.crt'}",
                f"--service-account-private-key-file={pki / 'sa.key'}",
                f"--cluster-signing-cert-file={pki / 'ca.crt'}",
                f"--cluster-signing-key-file={pki / 'ca.key'}",
            )
            self._wait("kube-controller-manager", f"https://127.0.0.1:{manager_port}/healthz", verify=False)

    def _make_credentials(self, port: int) -> None:
        """Certificates and kubeconfigs, made by kubeadm as it makes them for a real control plane."""
        config = self.folder / "kubeadm.yaml"
        config.write_text(
            f"""
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint: {{advertiseAddress: 192.0.2.1}}  # never used, but kubeadm refuses loopback here
nodeRegistration: {{name: stoker-apiserver, criSocket: "unix:///run/none.sock"}}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: v1.37.0  # given, or kubeadm looks up the latest on the internet
clusterName: stoker-apiserver
controlPlaneEndpoint: 127.0.0.1:{port}
certificatesDir: {self.folder / "pki"}
encryptionAlgorithm: ECDSA-P256
networking: {{serviceSubnet: {SERVICE_RANGE}}}
"""
        )
        for phase in ("certs ca", "certs apiserver", "certs sa"):
            self._kubeadm(phase, f"--config={config}")
        self._kubeadm("kubeconfig super-admin", f"--config={config}", f"--kubeconfig-dir={self.folder}")

    def _kubeadm(self, phase: str, *options: str) -> None:
        command = [str(self.folder / "kubeadm"), "init", "phase", *phase.split(), *options]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            raise ApiServerError(f"kubeadm init phase {phase} failed:\n{result.stdout}")

    def _spawn(self, component: str, *options: str) -> None:
        # In a session of its own, so that a Ctrl-C at the terminal reaches only us and `stop` decides the
        # order; with a death signal, so that even `kill -9` of the test run leaves no process behind.
        command = ["setpriv", "--pdeathsig", "KILL", str(self.folder / component), *options]
        command += self.options.get(component, ())
        with (self.folder / f"{component}.log").open("wb") as log:
            self.processes[component] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, component: str, url: str, *, verify: bool = True, timeout: float = 180) -> None:
        context = ssl.create_default_context(cafile=str(self.folder / "pki" / "ca.crt"))
        if not verify:  # the controller manager signs its own certificate
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        opener = urllib.request.build_opener(  # loopback, whatever proxy the environment names
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), opener.open(url, timeout=2):  # limit: of a look, which is repeated
                return
            self._check_alive()
            time.sleep(0.05)  # sleeps: between two looks, here too, since benchmarks use this alone
        raise ApiServerError(f"{component} not ready after {timeout:.0f} s:\n{self._log_tail(component)}")

    def _check_alive(self) -> None:
        for component, process in self.processes.items():
            if process.poll() is not None:
                code = process.returncode
                raise ApiServerError(f"{component} exited with {code}:\n{self._log_tail(component)}")

    def _log_tail(self, component: str) -> str:
        return "\n".join((self.folder / f"{component}.log").read_text().splitlines()[-20:])

    def requests(self) -> list[dict[str, Any]]:
        """The requests of service accounts so far, as audit events (audit.k8s.io/v1); watches when they end."""
        with (self.folder / "audit.log").open() as log:
            # The last line may be half written.
            return [json.loads(line) for line in log if line.endswith("\n")]

    def stop(self) -> None:
        # Killed, not stopped: the data goes too, and a graceful API server waits a minute for its watches.
        while self.processes:
            _, process = self.processes.popitem()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now. Held together, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a Kubernetes API server on loopback until Ctrl-C.")
    parser.add_argument("--no-controller-manager", action="store_true", help="etcd and the API server only")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ApiServer(controller_manager=not options.no_controller_manager) as server:
        print(f"export KUBECONFIG={server.kubeconfig}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
