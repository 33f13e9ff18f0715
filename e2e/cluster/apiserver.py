"""A real Kubernetes API server without a cluster: etcd, API server and controller manager as plain processes.

It corresponds to Go's envtest, but also runs the controllers. There are no nodes, so no pod runs or gets an IP.

    with ApiServer() as server:
        kubernetes.config.load_kube_config(str(server.kubeconfig))

Manually: ``python e2e/cluster/apiserver.py`` prints the line to export and runs until Ctrl-C.
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
# Records requests of service accounts, that is, of the operator. The controllers run as the administrator.
AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
"""


class ApiServerError(RuntimeError):
    """A component did not start; the message ends with the end of its log."""


def kube_binary() -> Path:
    """Return the all-in-one Kubernetes program; it is built on first use (minutes)."""
    built = subprocess.run([HERE / "build", "kube"], stdout=subprocess.PIPE, text=True)
    if built.returncode:
        raise ApiServerError(f"{HERE / 'build'} kube failed; what it said stands above")
    return Path(built.stdout.strip())


class ApiServer:
    """The API server, as a context manager or by `start` and `stop`.

    Args:
        options: additional options by component; if an option is repeated, the component uses the last.

    Attributes:
        kubeconfig: that of a cluster administrator.
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
        # The name of the program selects the component.
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
            "--unsafe-no-fsync",  # the data is deleted with the server
        )
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            # The `kubernetes` Service cannot point to loopback, and is not needed.
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
            (manager_port,) = free_ports(1)  # chosen late, since a free port may be taken
            self._spawn(
                "kube-controller-manager",
                # As the administrator: with an account per controller, the start takes 10 s.
                f"--kubeconfig={self.kubeconfig}",
                "--bind-address=127.0.0.1",
                f"--secure-port={manager_port}",
                "--leader-elect=false",
                # The default of 20 requests/s permits only five Deployments per second.
                "--kube-api-qps=1000",
                "--kube-api-burst=1000",
                "--controllers=*,-node-ipam-controller",  # there are no nodes, and no pod CIDR
                f"--root-ca-file={pki / 'ca.crt'}",
                f"--service-account-private-key-file={pki / 'sa.key'}",
                f"--cluster-signing-cert-file={pki / 'ca.crt'}",
                f"--cluster-signing-key-file={pki / 'ca.key'}",
            )
            self._wait("kube-controller-manager", f"https://127.0.0.1:{manager_port}/healthz", verify=False)

    def _make_credentials(self, port: int) -> None:
        """Create certificates and kubeconfigs with kubeadm, as for a real control plane."""
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
        # In its own session, so that Ctrl-C reaches only this process and `stop` sets the order; with a death signal,
        # so that even `kill -9` of the test run leaves no process behind.
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
        opener = urllib.request.build_opener(  # loopback, regardless of proxies in the environment
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), opener.open(url, timeout=2):  # limit: of one poll
                return
            self._check_alive()
            time.sleep(0.05)  # sleeps: between polls; benchmarks use this file without e2e/kit
        raise ApiServerError(f"{component} not ready after {timeout:.0f} s:\n{self._log_tail(component)}")

    def _check_alive(self) -> None:
        for component, process in self.processes.items():
            if process.poll() is not None:
                code = process.returncode
                raise ApiServerError(f"{component} exited with {code}:\n{self._log_tail(component)}")

    def _log_tail(self, component: str) -> str:
        return "\n".join((self.folder / f"{component}.log").read_text().splitlines()[-20:])

    def requests(self) -> list[dict[str, Any]]:
        """Return audit events (audit.k8s.io/v1) of service accounts' requests so far; watches appear at their end."""
        with (self.folder / "audit.log").open() as log:
            # The last line may be incomplete.
            return [json.loads(line) for line in log if line.endswith("\n")]

    def stop(self) -> None:
        # Killed: the data is deleted anyway, and a graceful stop of the API server waits a minute for its watches.
        while self.processes:
            _, process = self.processes.popitem()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Return loopback ports that are currently free. They are bound together, so that they differ."""
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
