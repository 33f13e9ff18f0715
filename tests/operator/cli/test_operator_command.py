"""The command line of ``stoker operator``: its meaning, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_operator.cli import operator
from stoker_operator.cli.operator import parse
from stoker_operator.settings import GatewaySettings, LeaseSettings, Settings, WebhookSettings

HERE = ("--operator-namespace=stoker-system",)
WEBHOOK = ("--webhook-address=:9443", "--webhook-secret=stoker-webhook")
GATEWAY = (
    "--gateway-url=https://[2001:db8::1]:8443/",
    "--gateway-namespace=stoker-system",
    "--gateway-service-account=stoker-gateway",
)
NO_URLS = ("", "a", "ftp://a", "https://", "https://a/v1", "http://a:x", "http://[::1", "http://a?b", "http://a b")
OWN = ("--webhook-host=stoker-webhook.stoker-system.svc", "--webhook-configuration=stoker")


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(operator, "POD_NAMESPACE", tmp_path / "namespace")


def test_defaults_need_no_flags() -> None:
    settings, logging = parse([])
    assert settings == Settings()
    assert logging == ("text", "info")


def test_flags_of_the_chart_are_parsed() -> None:
    settings, logging = parse(
        [*HERE, *WEBHOOK, *OWN, "--leader-elect", "--lease-name=mine", "--log-format=json", "--namespace=a"]
    )
    assert settings == Settings(
        namespaces=("a",),
        lease=LeaseSettings("stoker-system", "mine"),
        webhook=WebhookSettings(
            ":9443", "stoker-system", "stoker-webhook", ("stoker-webhook.stoker-system.svc",), "stoker"
        ),
    )
    assert logging.format == "json"


def test_referenced_objects_are_checked_only_with_the_flag() -> None:
    assert not parse([])[0].check_referenced_objects
    assert parse(["--check-referenced-objects"])[0].check_referenced_objects


def test_gateway_flags_are_parsed() -> None:
    settings, _ = parse([*GATEWAY])
    assert settings.gateway == GatewaySettings("https://[2001:db8::1]:8443", "stoker-system", "stoker-gateway")


def test_external_certificate_flags_are_parsed() -> None:
    settings, _ = parse([*HERE, *WEBHOOK, "--webhook-certificate=external"])
    assert settings.webhook == WebhookSettings(":9443", "stoker-system", "stoker-webhook", external=True)


def test_namespace_is_read_in_a_pod() -> None:
    operator.POD_NAMESPACE.write_text("of-the-pod\n")
    assert parse(["--leader-elect"])[0].lease == LeaseSettings("of-the-pod", "stoker")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--leader-elect"], "--operator-namespace is required outside a pod"),
        (WEBHOOK, "--operator-namespace is required outside a pod"),
        ([*HERE, "--webhook-address=:9443"], "--webhook-address requires --webhook-secret"),
        ([*HERE, *WEBHOOK], "--webhook-certificate=own requires --webhook-host"),
        ([*HERE, *WEBHOOK, OWN[0]], "--webhook-certificate=own requires --webhook-configuration"),
        ([*HERE, *WEBHOOK, *OWN, "--webhook-certificate=external"], "--webhook-host has no effect with"),
        (["--webhook-secret=a"], "--webhook-secret requires --webhook-address"),
        (["--webhook-host=a"], "--webhook-host requires --webhook-address"),
        (["--webhook-certificate=external"], "--webhook-certificate requires --webhook-address"),
        (["--health-address=8080"], "'8080' is not HOST:PORT"),
        (["--health-address=:99999"], "':99999' is not HOST:PORT"),
        (["--resync-seconds=0"], "'0' is not a finite number"),
        (["--resync-seconds=nan"], "'nan' is not a finite number"),
        (GATEWAY[:1], "--gateway-url requires --gateway-namespace and --gateway-service-account"),
        (GATEWAY[1:], "--gateway-namespace requires --gateway-url"),
        ([*GATEWAY, "--namespace=a"], "--gateway-url cannot be used with --namespace"),
        ([*GATEWAY, "--gateway-namespace=A"], "'A' is not a valid namespace name"),
        ([*GATEWAY, "--gateway-service-account=a b"], "'a b' is not a valid service account name"),
        ([*GATEWAY, "--gateway-url=https://a:b@c"], "the URL must not have credentials"),
        *(([*GATEWAY, f"--gateway-url={url}"], "URL without a path") for url in NO_URLS),
    ],
)
def test_invalid_flags_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(list(argv))
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_operator_ends_on_sigterm_before_it_has_started(tmp_path: Path) -> None:
    """SIGTERM ends it while it waits for an API server; as PID 1 it would otherwise ignore the signal."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        context = {"cluster": "a", "user": "a"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "a", "cluster": {"server": server}}],
            "users": [{"name": "a", "user": {}}],
            "contexts": [{"name": "a", "context": context}],
            "current-context": "a",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(document))
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker", "operator"],
            env={**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")},
            stderr=subprocess.PIPE,
            text=True,
        )
        silent.settimeout(60)
        connection, _ = silent.accept()  # its request gets no response
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        connection.close()
    assert process.returncode == 0
    assert "Traceback" not in stderr


def test_wrong_policy_is_refused_before_the_cluster_is_contacted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("template: Strict\n")
    assert operator._run([f"--policy={file}"]) == 2
    assert f"stoker operator: policy {file}: template: " in capsys.readouterr().err
