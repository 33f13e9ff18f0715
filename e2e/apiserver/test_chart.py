"""The chart's objects and its values. All tests of this folder show that the chart can be installed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.admission import webhook as webhook_module
from stoker_operator.api.manifest import parse as parse_endpoint
from stoker_operator.api.v1alpha1 import InferenceEndpoint
from stoker_operator.cli.operator import parse
from stoker_operator.cli.render import render
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.policy.policy import Policy
from stoker_operator.settings import LeaseSettings

CHART = Path(__file__).parents[2] / "charts/stoker"


def template(helm: str, *values: str) -> list[dict[str, Any]]:
    command = [helm, "template", "stoker", CHART, *(f"--set={value}" for value in values)]
    rendered = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [document for document in yaml.safe_load_all(rendered) if document]


def lasting(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the hooks, which exist only while they run."""
    return [each for each in documents if "helm.sh/hook" not in each["metadata"].get("annotations", {})]


def only(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def only_named(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def test_chart_passes_strict_lint(helm: str) -> None:
    subprocess.run([helm, "lint", "--strict", "--quiet", CHART], check=True)


def granted(rules: list[dict[str, Any]]) -> set[str]:
    return {f"{resource} {verb}" for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def test_operator_has_exactly_the_rights_it_needs(helm: str) -> None:
    documents = lasting(template(helm))
    roles = {each["metadata"]["name"]: each["rules"] for each in documents if each["kind"] in ("Role", "ClusterRole")}
    users = {name: granted(roles.pop(name)) for name in ("stoker-view", "stoker-edit")}
    assert set(roles) == {"stoker", "stoker-self", "stoker-webhook"}
    assert not [grant for rules in roles.values() for grant in granted(rules) if "*" in grant]
    everywhere = granted(roles["stoker"])
    assert {grant for grant in everywhere if grant.endswith(" delete")} == {
        "deployments delete",  # for a Deployment that never served, if its spec does not fit
        "poddisruptionbudgets delete",
        "podmonitors delete",
        "networkpolicies delete",
    }
    assert not [grant for grant in everywhere if grant.startswith("secrets")]
    assert "inferenceendpoints patch" not in everywhere  # the operator does not change users' specs
    for rule in [*roles["stoker-self"], *roles["stoker-webhook"]]:
        assert rule.get("resourceNames") or rule["verbs"] == ["create"]
    assert all(grant.startswith("inferenceendpoints") for grants in users.values() for grant in grants)
    assert "inferenceendpoints/status patch" not in users["stoker-edit"]  # only the operator writes it
    bound = {each["roleRef"]["name"] for each in documents if each["kind"] in ("RoleBinding", "ClusterRoleBinding")}
    assert bound == set(roles)
    without = template(helm, "rbac.aggregate=false")
    assert not [each for each in without if each["kind"] == "ClusterRole" and each["metadata"]["name"] in users]


@pytest.mark.parametrize(
    ("values", "kind"), [((), "ClusterRole"), (("watchNamespaces={a,b}",), "Role")], ids=["everywhere", "namespaces"]
)
def test_secrets_are_readable_only_with_the_value(helm: str, values: tuple[str, ...], kind: str) -> None:
    def roles(documents: list[dict[str, Any]]) -> list[set[str]]:
        found = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, "stoker")]
        return [granted(each["rules"]) for each in found]

    usual, chosen = template(helm, *values), template(helm, *values, "rbac.readReferencedObjects=true")
    for before, after in zip(roles(usual), roles(chosen), strict=True):
        assert after - before == {"secrets get", "configmaps get"}
        assert before < after
    flags = [
        set(only(each, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]) for each in (usual, chosen)
    ]
    assert flags[1] - flags[0] == {"--check-referenced-objects"}


def test_operator_pods_accept_only_webhook_and_prometheus_connections(helm: str) -> None:
    policy = only(template(helm), "NetworkPolicy")["spec"]
    pods = only(template(helm), "Deployment")["spec"]
    assert policy["podSelector"] == pods["selector"]
    assert policy["policyTypes"] == ["Ingress"]
    webhook, metrics = policy["ingress"]
    (container,) = pods["template"]["spec"]["containers"]
    named = {port["name"] for port in container["ports"]}
    assert {each["port"] for rule in policy["ingress"] for each in rule["ports"]} == named == {"webhook", "health"}
    assert "from" not in webhook
    assert webhook["ports"][0]["port"] == "webhook"
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert metrics["from"] == [{"namespaceSelector": monitoring}]
    closed = only(template(helm, "webhook.enabled=false", "networkPolicy.prometheus=null"), "NetworkPolicy")["spec"]
    assert not closed.get("ingress")
    assert not [each for each in template(helm, "networkPolicy.enabled=false") if each["kind"] == "NetworkPolicy"]


def policy_of(documents: list[dict[str, Any]], folder: Path) -> Policy:
    file = folder / "policy.yaml"
    file.write_text(only(documents, "ConfigMap")["data"]["policy.yaml"])
    return Policy.load(file)


def test_the_policy_reaches_the_operator(helm: str, tmp_path: Path) -> None:
    documents = template(helm)
    policy = policy_of(documents, tmp_path)
    assert (policy.template, policy.pod_monitors, policy.pod_monitor_labels) == ("Restricted", True, {})
    operator, prometheus = policy.network_policy_from or ()
    labels = only(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert operator.pod_selector and (operator.pod_selector.match_labels or {}).items() <= labels.items()
    assert operator.namespace_selector and operator.namespace_selector.match_labels == {
        "kubernetes.io/metadata.name": "default"
    }
    assert prometheus.namespace_selector and prometheus.pod_selector is None
    changed = template(
        helm,
        "policy.template=None",
        "networkPolicy.gateway[0].ipBlock.cidr=10.0.0.0/8",
        "networkPolicy.gateway[0].ipBlock.except={10.1.0.0/16}",
        "monitoring.endpointLabels.release=mine",
        "monitoring.kind=ServiceMonitor",
    )
    policy = policy_of(changed, tmp_path)
    assert (policy.template, policy.pod_monitors, policy.pod_monitor_labels) == ("None", False, {"release": "mine"})
    assert policy.network_policy_from
    (gateway,) = (each.ip_block for each in policy.network_policy_from if each.ip_block)
    assert (gateway.cidr, gateway.except_) == ("10.0.0.0/8", ["10.1.0.0/16"])

    def checksum(rendered: list[dict[str, Any]]) -> Any:
        return only(rendered, "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/policy"]

    assert checksum(documents) != checksum(changed)


def test_operator_has_the_environment_of_the_values(helm: str) -> None:
    values = (
        "env[0].name=HTTPS_PROXY",
        "env[0].value=http://p:1",
        "env[1].name=T",
        "env[1].valueFrom.fieldRef.fieldPath=f",
    )
    (container,) = only(template(helm, *values), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [
        {"name": "HTTPS_PROXY", "value": "http://p:1"},
        {"name": "T", "valueFrom": {"fieldRef": {"fieldPath": "f"}}},
    ]
    (bare,) = only(template(helm), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "env" not in bare


def test_images_may_be_named_by_their_digest(helm: str, tmp_path: Path) -> None:
    digest = "sha256:" + "a1" * 32
    mirror = "registry.example.com:5000/mirror"
    for registry in ("", mirror):
        documents = template(
            helm,
            f"images.registry={registry}",
            f"images.operator=stoker/operator@{digest}",
            f"images.engine.cpu=engine@{digest}",
            f"images.engine.cuda=stoker/engine-cuda:1@{digest}",
            f"catalogue.runtimes.vllm.cuda=other.example.com/vllm@{digest}",
        )
        before = f"{registry}/" if registry else ""
        (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"{before}stoker/operator@{digest}"
        file = tmp_path / "catalogue.yaml"
        file.write_text(only(documents, "ConfigMap")["data"]["catalogue.yaml"])
        catalogue = Catalogue.load(file)
        assert catalogue.image("stoker", "cpu") == f"{before}engine@{digest}"
        assert catalogue.image("stoker", "nvidia-l4") == f"{before}stoker/engine-cuda:1@{digest}"
        assert catalogue.image("vllm", "nvidia-l4") == f"other.example.com/vllm@{digest}"


def test_operator_pod_is_restricted(helm: str) -> None:
    spec = only(template(helm), "Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_rendered_arguments_are_accepted_by_the_command(helm: str) -> None:
    """The command accepts the arguments that the chart renders."""
    for values in ([], ["webhook.enabled=false"], ["webhook.certificate=cert-manager", "watchNamespaces={a,b}"]):
        documents = template(helm, *values)
        (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["args"][0] == "operator"
        settings, _ = parse(container["args"][1:])
        assert settings.lease == LeaseSettings("default", "stoker")
        # Operators of other releases find this one by namespace, name and label.
        metadata = only(documents, "Deployment")["metadata"]
        assert (metadata["namespace"], metadata["name"]) == (settings.lease.namespace, settings.lease.name)
        assert metadata["labels"]["app.kubernetes.io/name"] == "stoker-operator"
        if settings.webhook is None:
            assert not [each for each in documents if each["kind"] in ("ValidatingWebhookConfiguration", "Secret")]
            continue
        (webhook,) = only(documents, "ValidatingWebhookConfiguration")["webhooks"]
        service = webhook["clientConfig"]["service"]
        assert service["path"] == webhook_module.PATH
        if not settings.webhook.external:
            assert settings.webhook.hosts == (f"{service['name']}.{service['namespace']}.svc",)
            assert settings.webhook.secret == only(documents, "Secret")["metadata"]["name"]


def test_webhook_certificate_may_come_from_cert_manager(helm: str) -> None:
    documents = template(helm, "webhook.certificate=cert-manager")
    assert not [each for each in documents if each["kind"] == "Secret"]
    assert "stoker-webhook" not in [each["metadata"]["name"] for each in documents if each["kind"] == "ClusterRole"]
    certificate = only(documents, "Certificate")
    configuration = only(documents, "ValidatingWebhookConfiguration")
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": "default/stoker-webhook"}
    assert certificate["spec"]["dnsNames"] == ["stoker-webhook.default.svc"]
    assert certificate["spec"]["issuerRef"] == {"name": only(documents, "Issuer")["metadata"]["name"]}
    documents = template(
        helm,
        "webhook.certificate=cert-manager",
        "webhook.certManager.issuerRef.name=mine",
        "webhook.certManager.issuerRef.kind=ClusterIssuer",
    )
    assert only(documents, "Certificate")["spec"]["issuerRef"] == {"name": "mine", "kind": "ClusterIssuer"}
    assert not [each for each in documents if each["kind"] == "Issuer"]


def test_the_catalogue_reaches_the_operator(helm: str, tmp_path: Path) -> None:
    documents = template(
        helm,
        "images.operator=my/operator:1",
        "images.engine.cuda=my/cuda:2",
        "catalogue.runtimes.stoker.rocm=my/rocm:3",
        "catalogue.runtimes.vllm.cuda=my/vllm:4",
        "catalogue.accelerators.my-gpu.images=cuda",
        "catalogue.accelerators.my-gpu.arch=mine",
        "catalogue.accelerators.my-gpu.nodeLabels.a\\.b/c={d}",
        "catalogue.accelerators.my-gpu.tolerations[0].operator=Exists",
        "catalogue.supports.vllm.mine.dtypes={float16}",
        "catalogue.releases.stoker.devices=8",
    )
    file = tmp_path / "catalogue.yaml"
    file.write_text(only(documents, "ConfigMap")["data"]["catalogue.yaml"])
    catalogue = Catalogue.load(file)
    assert catalogue.image("stoker", "my-gpu") == catalogue.image("stoker", "nvidia-l4") == "my/cuda:2"
    assert catalogue.image("stoker", "amd-mi300x") == "my/rocm:3"
    assert catalogue.image("vllm", "my-gpu") == "my/vllm:4"
    assert catalogue.image("stoker", "cpu") == Catalogue.load().image("stoker", "cpu")
    assert catalogue.accelerators["my-gpu"].node_labels == {"a.b/c": ["d"]}
    assert catalogue.accelerators["nvidia-l4"] == Catalogue.load().accelerators["nvidia-l4"]
    assert catalogue.supports["vllm"]["mine"].dtypes == ["float16"]
    assert catalogue.releases["stoker"].devices == 8
    (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "my/operator:1"


def test_images_come_from_the_configured_registry(helm: str, tmp_path: Path) -> None:
    registry = "registry.example.com:5000/mirror"
    documents = template(
        helm, f"images.registry={registry}", "images.tag=9.9", "catalogue.runtimes.vllm.rocm=other.example.com/vllm:1"
    )
    (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{registry}/stoker/operator:9.9"
    file = tmp_path / "catalogue.yaml"
    file.write_text(only(documents, "ConfigMap")["data"]["catalogue.yaml"])
    catalogue = Catalogue.load(file)
    assert catalogue.image("stoker", "cpu") == f"{registry}/stoker/engine-cpu:9.9"
    assert catalogue.image("vllm", "nvidia-l4") == f"{registry}/{Catalogue.load().image('vllm', 'nvidia-l4')}"
    assert catalogue.image("vllm", "amd-mi300x") == "other.example.com/vllm:1"
    named = template(helm, f"images.registry={registry}", "images.operator=localhost/my/operator:1")
    (container,) = only(named, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "localhost/my/operator:1"


def test_crd_is_kept_on_uninstall_by_default(helm: str) -> None:
    policy = {"helm.sh/resource-policy": "keep"}
    kept = only(template(helm), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"] == policy
    unkept = only(template(helm, "crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in unkept["metadata"]
    assert unkept["spec"] == kept["spec"]
    assert "CustomResourceDefinition" not in [each["kind"] for each in template(helm, "crds.install=false")]


def test_example_values_render(helm: str) -> None:
    examples = sorted((CHART / "examples").glob("*.yaml"))
    assert examples
    for path in examples:
        subprocess.run([helm, "template", "stoker", CHART, "-f", path], stdout=subprocess.PIPE, check=True)
    demo()


def test_image_set_twice_is_refused(helm: str) -> None:
    values = ("images.engine.cpu=a/b:1", "catalogue.runtimes.stoker.cpu=a/c:1")
    command = [helm, "template", "stoker", CHART, *(f"--set={value}" for value in values)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "images.engine.cpu and catalogue.runtimes.stoker.cpu both set an image" in result.stderr


def test_rights_are_limited_to_the_watched_namespaces(helm: str) -> None:
    documents = lasting(template(helm, "watchNamespaces={one,two}"))
    everywhere = [each for each in documents if each["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    users = {"stoker-view", "stoker-edit"}
    assert {each["metadata"]["name"] for each in everywhere} - users == {"stoker-webhook"}  # its rules name one object
    roles = {each["metadata"]["namespace"]: each["rules"] for each in documents if each["kind"] == "Role"}
    assert set(roles) == {"one", "two", "default"}
    bound = [each["metadata"]["namespace"] for each in documents if each["kind"] == "RoleBinding"]
    assert set(bound) == set(roles)
    all_of_it = granted(only_named(template(helm), "ClusterRole", "stoker")["rules"])
    assert granted(roles["one"]) == granted(roles["two"]) == all_of_it - {"nodes list", "nodes watch"}
    (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"--namespace=one", "--namespace=two"} <= set(container["args"])
    (webhook,) = only(documents, "ValidatingWebhookConfiguration")["webhooks"]
    (expression,) = webhook["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["one", "two"]


def test_nodes_with_pods_of_the_chart_can_be_drained(helm: str) -> None:
    budgets = [each["spec"] for each in template(helm, "gateway.enabled=true") if each["kind"] == "PodDisruptionBudget"]
    assert [each["maxUnavailable"] for each in budgets] == [1, 1]
    assert {each["unhealthyPodEvictionPolicy"] for each in budgets} == {"AlwaysAllow"}
    assert not [each for each in template(helm, "replicas=1") if each["kind"] == "PodDisruptionBudget"]


def test_pod_monitor_is_rendered_if_the_cluster_has_the_kind(helm: str) -> None:
    def monitors(*arguments: str) -> int:
        command = [helm, "template", "stoker", CHART, *arguments]
        rendered = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return rendered.count("kind: PodMonitor\n")

    known = "--api-versions=monitoring.coreos.com/v1/PodMonitor"
    assert (monitors(), monitors(known), monitors(known, "--set=monitoring.podMonitor=Disabled")) == (0, 1, 0)
    assert monitors("--set=monitoring.podMonitor=Enabled") == 1
    services = template(helm, "monitoring.podMonitor=Enabled", "monitoring.kind=ServiceMonitor", "watchNamespaces={a}")
    assert not [each for each in services if each["kind"] == "PodMonitor"]
    operator_monitor = only_named(services, "ServiceMonitor", "stoker")["spec"]
    service = only_named(services, "Service", "stoker-metrics")
    assert operator_monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    webhook = only_named(services, "Service", "stoker-webhook")
    assert not operator_monitor["selector"]["matchLabels"].items() <= webhook["metadata"]["labels"].items()
    assert [each["port"] for each in operator_monitor["endpoints"]] == [
        each["name"] for each in service["spec"]["ports"]
    ]
    # The ServiceMonitor must select the labels that the operator sets on an endpoint's Service.
    found = only_named(services, "ServiceMonitor", "stoker-endpoints")["spec"]
    assert found["namespaceSelector"] == {"matchNames": ["a"]}
    (made,) = (each for each in render(demo(), Catalogue.load()) if each["kind"] == "Service")
    assert found["selector"]["matchLabels"].items() <= made["metadata"]["labels"].items()
    assert [each["port"] for each in found["endpoints"]] == [each["name"] for each in made["spec"]["ports"]]


def demo() -> InferenceEndpoint:
    spec = yaml.safe_load((CHART / "examples/demo-model.yaml").read_text())["endpoints"]["demo"]["spec"]
    kind = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceEndpoint"}
    return parse_endpoint({**kind, "metadata": {"name": "demo"}, "spec": spec})


@pytest.mark.parametrize("name", ["default", "confined", "cert-manager", "gateway"])
def test_chart_renders_the_golden_files(helm: str, name: str) -> None:
    """The chart renders the golden files; STOKER_GOLDEN=write updates them.

    The gateway's Secrets are named, because the certificate and token that the chart generates otherwise are random.
    """
    values = {
        "default": [],
        "confined": ["watchNamespaces={one}"],
        "cert-manager": ["webhook.certificate=cert-manager"],
        "gateway": ["gateway.enabled=true", "gateway.tls.secretName=tls", "gateway.peers.secretName=peers"],
    }
    documents = lasting(template(helm, "crds.install=false", *values[name]))
    rendered = yaml.safe_dump_all(documents, sort_keys=False, width=120)
    # The catalogue has the version, which changes with each release.
    rendered = re.sub(r"(?<=checksum/catalogue: )[0-9a-f]{64}", "SHA256", rendered)
    golden = Path(__file__).with_name("golden") / f"chart-{name}.yaml"
    if os.environ.get("STOKER_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered)
    assert rendered == golden.read_text()


@pytest.mark.parametrize(
    "value",
    [
        "nonsense=1",
        "images.operater=x",
        "logLevel=loud",
        "logFormat=xml",
        "replicas=0",
        "accelerators.a.images=cuda",
        "catalogue.accelerators.a.memory=1",
        "catalogue.accelerators.A.images=cuda",
        "catalogue.accelerators.a.tolerations[0].nonsense=1",
        "catalogue.supports.vllm.sm_90.dtype={float16}",
        "catalogue.runtimes.vllm.cuda=",
        "webhook.enabled=maybe",
        "webhook.failurePolicy=Perhaps",
        "webhook.timeoutSeconds=31",
        "webhook.certificate=none",
        "webhook.certManager.issuerRef.kind=ClusterIssuer",
        "monitoring.podMonitor=true",
        "podDisruptionBudget.maxUnavailable=1",
        "namespaces={a}",
        "monitoring.dashboards=true",
        "endpoints.demo.replicas=1",
        "endpoints.Demo.spec.model.source=demo://gemma-3-270m",
        "images.registry=registry.example.com/",
        "crds.keep=maybe",
        "policy.template=Some",
        "policy.templates=Full",
        "networkPolicy.prometheus={a}",
        "networkPolicy.gateway[0].podselector.a=b",
        "networkPolicy.gateway[0].ipBlock.except={10.0.0.0/8}",
        "env.A=b",
        "env[0].value=b",
        "monitoring.kind=Probe",
        "monitoring.alerts=true",
        "monitoring.endpointLabels={a}",
        "rbac.aggregate=maybe",
    ],
)
def test_a_wrong_value_is_refused(helm: str, value: str) -> None:
    command = [helm, "template", "stoker", CHART, "--set", value]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "values don't meet the specifications of the schema" in result.stderr
