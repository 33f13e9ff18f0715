"""The operator as a process: alone, or as one of several replicas."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from apiserver import free_ports
from prometheus_client.parser import text_string_to_metric_families

from .cluster_client import SYSTEM, wait_for


def get(port: int, path: str) -> tuple[int, str]:
    """Return status and text of a response on a local port; status 0 if nothing responds."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        if not isinstance(getattr(error, "reason", error), ConnectionError):
            raise  # it responds, but slowly
        return 0, ""


class Operator:
    """``stoker operator`` as a process.

    As a context manager it runs until the end of the block; then its log must pass `check_log`.

    Args:
        kubeconfig: the cluster and credentials.
        log: file to which its log is appended.
        options: additional command line arguments.
        program: arguments for Python.
    """

    def __init__(
        self, kubeconfig: Path, log: Path, *options: str, program: Sequence[str] = ("-m", "stoker", "operator")
    ) -> None:
        self.kubeconfig, self.log, self.options, self.program = kubeconfig, log, options, program
        # Prints tracebacks if the interpreter crashes.
        self.environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONFAULTHANDLER": "1"}
        self.process: subprocess.Popen[bytes] | None = None
        self.health = 0

    def __enter__(self) -> Operator:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = self.stop()
        check_log(self.log)
        assert code == 0, f"exit code {code}: {self.log.read_text()}"

    def start(self) -> None:
        """Start it if it does not run, and wait until it is ready."""
        if self.process is None:
            (self.health,) = free_ports(1)
            address = f"--health-address=127.0.0.1:{self.health}"
            command = [sys.executable, *self.program, address, *self.options]
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            try:
                wait_for(self._is_ready, "the operator is ready", timeout=120)
            except BaseException:
                self.process.kill()
                self.process.wait()
                self.process = None
                raise

    def _is_ready(self) -> bool:
        assert self.process and self.process.poll() is None, self.log.read_text()
        return get(self.health, "/readyz")[0] == 200

    def reconciles(self) -> float:
        """Return the number of reconciles since its start."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(get(self.health, "/metrics")[1])
            for sample in family.samples
            if sample.name == "stoker_operator_reconciles_total"
        )

    def stop(self) -> int:
        """Send SIGTERM, as Kubernetes does, if it runs; return its exit code."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=120)
        self.process = None
        return code


def check_log(log: Path) -> None:
    """Assert that an operator's log contains no tracebacks and no denied requests."""
    logged = log.read_text()
    assert "Traceback" not in logged, f"{log}: {logged}"
    assert '" cannot ' not in logged, (
        f"{log}: {logged}"
    )  # as in: User "system:serviceaccount:..." cannot patch resource


class Replica:
    """A replica as a process."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.health, self.webhook = free_ports(2)
        self.log, self.is_leaving = log, False
        command = [
            sys.executable, "-m", "stoker", "operator",
            f"--operator-namespace={SYSTEM}", "--leader-elect", "--lease-name=stoker",
            f"--health-address=127.0.0.1:{self.health}",
            f"--webhook-address=127.0.0.1:{self.webhook}", "--webhook-secret=stoker-webhook",
            "--webhook-configuration=stoker", "--webhook-host=127.0.0.1", "--log-format=json",
        ]  # fmt: skip
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a response; status 0 if nothing responds."""
        return get(self.health, path)

    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def leads(self) -> bool:
        return "\nstoker_operator_leader 1.0\n" in self.get("/metrics")[1]

    def review(self, authorities: str, review: Any) -> Any:
        """Return its response to an AdmissionReview that is sent as by the API server."""
        tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=authorities))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
        with opener.open(f"https://127.0.0.1:{self.webhook}/validate", json.dumps(review).encode(), 30) as answer:
            return json.load(answer)

    def leave(self) -> None:
        """Send SIGTERM once, as Kubernetes does. It serves reviews for some more seconds."""
        if not self.is_leaving:
            self.is_leaving = True
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Stop it as Kubernetes does; return its exit code."""
        self.leave()
        return self.process.wait(timeout=60)

    def check(self) -> None:
        """Assert `check_log`, and that each line is JSON with a message."""
        check_log(self.log)
        assert all(json.loads(line)["message"] for line in self.log.read_text().strip("\n").split("\n"))
