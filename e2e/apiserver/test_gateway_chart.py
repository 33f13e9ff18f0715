"""The gateway's part of the chart."""

from __future__ import annotations

import base64
import os
import subprocess
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography import x509

from stoker_gateway.cli.gateway import parser_of
from stoker_operator.admission.certificates import Certificate

from .test_chart import CHART, granted, lasting, only_named, template

ON = "gateway.enabled=true"


def pods(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = only_named(documents, "Deployment", "stoker-gateway")["spec"]
    return spec


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = pods(documents)["template"]["spec"]["containers"]
    return dict(found)


def test_gateway_is_off_by_default(helm: str) -> None:
    assert not [each for each in template(helm) if "gateway" in each["metadata"]["name"]]
    there = [each for each in template(helm, ON) if "gateway" in each["metadata"]["name"]]
    assert len(there) == 13


def test_rendered_flags_are_accepted_by_the_command(helm: str) -> None:
    documents = template(helm, ON, "gateway.drain.delaySeconds=7", "gateway.drain.timeoutSeconds=90")
    command, *words = container(documents)["args"]
    assert command == "gateway"
    options = parser_of().parse_args(words)
    assert (options.kubernetes, options.namespace, options.host) == (True, "default", "::")
    assert (options.drain_delay, options.drain_timeout, options.max_body_size) == (7, 90, 32 << 20)
    assert pods(documents)["template"]["spec"]["terminationGracePeriodSeconds"] > 97
    ports = {each["name"]: each["containerPort"] for each in container(documents)["ports"]}
    assert ports == {"clients": options.port, "metrics": options.metrics_port, "peers": 8082}
    peers = only_named(documents, "Service", "stoker-gateway-peers")
    assert options.peer_service == f"{peers['metadata']['name']}.default.svc:{ports['peers']}"
    assert options.peer_listen == f"[::]:{ports['peers']}"
    mounts = {each["mountPath"] for each in container(documents)["volumeMounts"]}
    for file in (options.tls_cert, options.tls_key, options.peer_token_file):
        assert str(file.parent) in mounts
    six = parser_of().parse_args(container(template(helm, ON, "gateway.listen=::"))["args"][1:])
    assert (six.host, six.peer_listen) == ("::", "[::]:8082")


def test_selectors_match_the_gateways_pods(helm: str) -> None:
    documents = template(helm, ON, "monitoring.podMonitor=Enabled")
    labels = pods(documents)["template"]["metadata"]["labels"]
    selector = pods(documents)["selector"]["matchLabels"]
    operators = only_named(documents, "Deployment", "stoker")["spec"]
    assert not operators["selector"]["matchLabels"].items() <= labels.items()
    assert selector.items() <= labels.items()
    for service in ("stoker-gateway", "stoker-gateway-peers"):
        assert only_named(documents, "Service", service)["spec"]["selector"] == selector
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        assert only_named(documents, kind, "stoker-gateway")["spec"]["selector"]["matchLabels"] == selector
    policy = only_named(documents, "NetworkPolicy", "stoker-gateway")["spec"]
    assert policy["podSelector"]["matchLabels"] == selector
    clients, peers, signals, metrics = policy["ingress"]
    assert signals == {
        "ports": [{"protocol": "TCP", "port": "metrics"}],
        "from": [{"podSelector": {"matchLabels": operators["selector"]["matchLabels"]}}],
    }
    assert "from" not in clients and clients["ports"][0]["port"] == "clients"
    assert peers["from"] == [{"podSelector": {"matchLabels": selector}}]
    assert metrics["from"] and metrics["ports"][0]["port"] == "metrics"
    single = template(helm, ON, "gateway.replicas=1")
    assert not [each for each in single if each["kind"] == "PodDisruptionBudget" and "gateway" in str(each["metadata"])]


def test_external_scaler_is_reachable_for_keda_and_other_replicas(helm: str) -> None:
    assert not [each for each in template(helm, ON) if "scaler" in str(each["metadata"]["name"])]
    documents = template(helm, ON, "gateway.externalScaler.enabled=true")
    options = parser_of().parse_args(container(documents)["args"][1:])
    assert options.external_scaler_listen == "[::]:8083"
    ports = {each["name"]: each["containerPort"] for each in container(documents)["ports"]}
    selector = pods(documents)["selector"]["matchLabels"]
    service = only_named(documents, "Service", "stoker-gateway-scaler")["spec"]
    assert service["selector"] == selector and service["ports"][0]["targetPort"] == "scaler"
    assert (ports["scaler"], service["ports"][0]["port"]) == (8083, 8083)
    policy = only_named(documents, "NetworkPolicy", "stoker-gateway")["spec"]
    of_metrics = next(each for each in policy["ingress"] if each["ports"][0]["port"] == "metrics")
    assert {"podSelector": {"matchLabels": selector}} in of_metrics["from"]
    (of_scaler,) = [each for each in policy["ingress"] if each["ports"][0]["port"] == "scaler"]
    assert of_scaler["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}]
    closed = template(helm, ON, "gateway.externalScaler.enabled=true", "gateway.externalScaler.from=null")
    policy = only_named(closed, "NetworkPolicy", "stoker-gateway")["spec"]
    assert "scaler" not in {each["ports"][0]["port"] for each in policy["ingress"]}
    four = template(helm, ON, "gateway.externalScaler.enabled=true", "gateway.listen=0.0.0.0")
    assert parser_of().parse_args(container(four)["args"][1:]).external_scaler_listen == "0.0.0.0:8083"


def test_gateway_has_exactly_the_rights_it_needs(helm: str) -> None:
    documents = lasting(template(helm, ON))
    assert granted(only_named(documents, "ClusterRole", "stoker-gateway")["rules"]) == {
        "inferenceendpoints list",
        "inferenceendpoints watch",
        "endpointslices list",
        "endpointslices watch",
    }
    role = only_named(documents, "Role", "stoker-gateway")
    assert (granted(role["rules"]), role["metadata"]["namespace"]) == ({"secrets list", "secrets watch"}, "default")


def test_generated_certificate_covers_the_gateways_hosts(helm: str) -> None:
    documents = template(helm, ON, "gateway.url=https://models.example.com:8443/")
    data = only_named(documents, "Secret", "stoker-gateway-tls")["data"]
    crt, key, ca = (base64.b64decode(data[name]) for name in ("tls.crt", "tls.key", "ca.crt"))
    Certificate(crt, key).check(datetime.now(UTC))
    leaf, authority = x509.load_pem_x509_certificate(crt), x509.load_pem_x509_certificate(ca)
    leaf.verify_directly_issued_by(authority)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = set(names.get_values_for_type(x509.DNSName))
    assert {"stoker-gateway.default.svc", "models.example.com"} <= hosts
    with_secret = template(helm, ON, "gateway.tls.secretName=mine")
    assert not [each for each in with_secret if each["metadata"]["name"] == "stoker-gateway-tls"]
    assert {"name": "tls", "secret": {"secretName": "mine"}} in pods(with_secret)["template"]["spec"]["volumes"]
    bare = template(helm, ON, "gateway.tls.enabled=false")
    assert container(bare)["readinessProbe"]["httpGet"]["scheme"] == "HTTP"
    assert only_named(bare, "Service", "stoker-gateway")["spec"]["ports"][0]["port"] == 80


def test_upgrade_keeps_token_and_certificate(helm: str, kube: Any, ns: str) -> None:
    environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}

    def put(word: str) -> list[dict[str, str]]:
        values = f"{ON},crds.install=false,rbac.aggregate=false,webhook.enabled=false"
        command = [helm, word, "gw", CHART, f"--namespace={ns}", "--set", values]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        names = ("gw-stoker-gateway-peers", "gw-stoker-gateway-tls")
        return [kube.core.read_namespaced_secret(name, ns).data for name in names]

    try:
        made = put("install")
        assert put("upgrade") == made
    finally:
        subprocess.run([helm, "uninstall", "gw", f"--namespace={ns}"], env=environment, stdout=subprocess.DEVNULL)


def test_certificate_follows_the_url_with_the_same_ca(helm: str, kube: Any, ns: str) -> None:
    environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}

    def put(word: str, url: str) -> dict[str, bytes]:
        values = f"{ON},crds.install=false,rbac.aggregate=false,webhook.enabled=false,gateway.url={url}"
        command = [helm, word, "gw", CHART, f"--namespace={ns}", "--set", values]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        data = kube.core.read_namespaced_secret("gw-stoker-gateway-tls", ns).data
        return {name: base64.b64decode(value) for name, value in data.items()}

    def names(data: dict[str, bytes]) -> set[str]:
        Certificate(data["tls.crt"], data["tls.key"]).check(datetime.now(UTC))
        leaf, authority = (x509.load_pem_x509_certificate(data[name]) for name in ("tls.crt", "ca.crt"))
        leaf.verify_directly_issued_by(authority)
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return {*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))}

    try:
        first = put("install", "")
        first_names = names(first)
        later = put("upgrade", "https://models.example.com")
        assert names(later) == first_names | {"models.example.com"}
        assert put("upgrade", "https://models.example.com:8443") == later  # same host name
        last = put("upgrade", "https://[fd00::1]")
        assert names(last) == first_names | {"fd00::1"}
        assert {each["ca.crt"] for each in (first, later, last)} == {first["ca.crt"]}
        # A Secret of an earlier chart has no annotation of its hosts, and the key of its CA was not kept.
        kube.core.delete_namespaced_secret("gw-stoker-gateway-authority", ns)
        earlier = {"metadata": {"annotations": {"stoker.dev/certificate-for": None}}}
        kube.core.patch_namespaced_secret("gw-stoker-gateway-tls", ns, earlier)
        assert put("upgrade", "https://other.example.com") == last
        kube.core.delete_namespaced_secret("gw-stoker-gateway-tls", ns)
        assert names(put("upgrade", "https://other.example.com")) == first_names | {"other.example.com"}
    finally:
        subprocess.run([helm, "uninstall", "gw", f"--namespace={ns}"], env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "value",
    [
        "watchNamespaces={one}",
        "gateway.replicas=0",
        "gateway.url=models.example.com",
        "gateway.listen=localhost",
        "gateway.drain.delaySeconds=-1",
        "gateway.nonsense=1",
    ],
)
def test_impossible_values_are_refused(helm: str, value: str) -> None:
    command = [helm, "template", "stoker", CHART, f"--set={ON}", f"--set={value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and value.partition("=")[0].rpartition(".")[2] in done.stderr
