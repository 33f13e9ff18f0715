"""Restricted templates permit only what Kubernetes' restricted standard does; stricter policies stop no endpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1.template import PodTemplate
from stoker_operator.api.violation import Refused
from stoker_operator.cli.render import render
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.policy.template_policy import forbidden

from .cluster_client import wait_for
from .operator_process import Operator

#: Versions of the standard: that of the oldest Kubernetes that the chart supports, and the current one.
VERSIONS = ("v1.31", "latest")


def mostly(*values: Any, rarely: tuple[Any, ...] = ()) -> Any:
    """Draw one of the valid values, and sometimes an invalid one."""
    return st.sampled_from([*values * (1 + 7 * len(rarely) // len(values)), *rarely])


def some(**parts: Any) -> Any:
    return st.fixed_dictionaries({}, optional=parts)


profiles = mostly(
    {"type": "RuntimeDefault"},
    {"type": "Localhost", "localhostProfile": "p"},
    rarely=({"type": "Unconfined"}, {"localhostProfile": "p"}, {}),
)
selinux = mostly({"level": "s0:c1,c2"}, {"type": "container_t"}, {}, rarely=({"type": "spc_t"}, {"role": "r"}))
common = {
    "runAsNonRoot": mostly(True, None, rarely=(False,)),
    "runAsUser": mostly(1, 65532, rarely=(0, 0.0)),
    "runAsGroup": st.sampled_from([0, 1]),
    "seccompProfile": profiles,
    "appArmorProfile": profiles,
    "seLinuxOptions": selinux,
}
capabilities = mostly(
    {"drop": ["ALL"]},
    {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
    {"drop": ["KILL", "ALL"], "add": []},
    rarely=({"add": ["NET_BIND_SERVICE"]}, {"drop": ["KILL"]}, {"drop": []}, {"drop": ["ALL"], "add": ["CHOWN"]}, {}),
)
security = st.fixed_dictionaries(
    {"allowPrivilegeEscalation": mostly(False, rarely=(True, None)), "capabilities": capabilities},
    optional={
        **common,
        "privileged": mostly(False, rarely=(True,)),
        "readOnlyRootFilesystem": st.booleans(),
        "procMount": mostly("Default", rarely=("Unmasked",)),
    },
)
handlers = mostly(
    {"httpGet": {"port": 1}},
    {"tcpSocket": {"port": 1, "host": ""}},
    {"exec": {"command": ["true"]}},
    rarely=({"httpGet": {"port": 1, "host": "h"}}, {"tcpSocket": {"port": 1, "host": "h"}}),
)
ports = mostly([{"containerPort": 1}], [], rarely=([{"containerPort": 1, "hostPort": 1}],))
lifecycles = mostly(
    {"postStart": {"exec": {"command": ["true"]}}}, rarely=({"preStop": {"httpGet": {"port": 1, "host": "h"}}},)
)
volumes = mostly(
    {"emptyDir": {}},
    {"configMap": {"name": "c"}},
    {"secret": {"secretName": "s"}},
    {"csi": {"driver": "d.example.com"}},
    {"persistentVolumeClaim": {"claimName": "c"}},
    {"projected": {"sources": [{"secret": {"name": "s"}}, {"configMap": {"name": "c"}}]}},
    {"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    {"ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"],
                                                    "resources": {"requests": {"storage": "1Gi"}}}}}},
    {"emptyDir": {}, "hostPath": None},
    {},
    rarely=(
        {"hostPath": {"path": "/"}}, {"nfs": {"server": "s", "path": "/"}}, {"gitRepo": {"repository": "r"}},
        {"image": {"reference": "i"}}, {"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}},
    ),
)  # fmt: skip
names = st.sampled_from(["engine", "sidecar", "more"])


@st.composite
def containers(draw: Any, choices: tuple[str, ...]) -> Any:
    """Draw containers with different names; the engine's has no fields that are set elsewhere in the spec."""
    made = []
    for name in draw(st.lists(st.sampled_from(choices), max_size=2, unique=True)):
        more = draw(some(livenessProbe=handlers, lifecycle=lifecycles, ports=ports))
        engine_fields = (
            draw(some(securityContext=some(**common, capabilities=capabilities))) if name == "engine" else {}
        )
        sidecar_fields = {} if name == "engine" else {"image": "i", "securityContext": draw(security)}
        made.append({"name": name, **more, **engine_fields, **sidecar_fields})
    return made


sysctls = mostly(
    [{"name": "net.ipv4.tcp_syncookies", "value": "1"}], [],
    rarely=([{"name": "kernel.msgmax", "value": "1"}], [{"name": "net.ipv4.tcp_rmem", "value": "1 2 3"}]),
)  # fmt: skip
pods = some(
    hostPID=mostly(False, None, rarely=(True,)),
    hostNetwork=mostly(False, rarely=(True,)),
    hostIPC=mostly(False, rarely=(True,)),
    hostUsers=st.booleans(),
    automountServiceAccountToken=mostly(False, rarely=(True,)),
    securityContext=some(**common, fsGroup=st.sampled_from([0, 7]), supplementalGroups=st.just([0]), sysctls=sysctls),
    containers=containers(("engine", "sidecar", "more")),
    initContainers=containers(("first", "second")),
    volumes=st.lists(volumes, max_size=2).map(
        lambda kinds: [{"name": f"v{n}", **kind} for n, kind in enumerate(kinds)]
    ),
    nodeSelector=st.just({"disk": "ssd"}),
    tolerations=st.just([{"operator": "Exists"}]),
    shareProcessNamespace=st.booleans(),
)
annotations = some(
    **{
        "container.apparmor.security.beta.kubernetes.io/engine": mostly(
            "runtime/default", "localhost/p", rarely=("unconfined",)
        )
    }
)


@pytest.fixture
def confined(kube: Any) -> Any:
    """Namespaces that accept only restricted pods, by version of the standard."""
    made = {version: f"restricted-{version.replace('.', '-')}" for version in VERSIONS}
    for version, name in made.items():
        labels = {
            "pod-security.kubernetes.io/enforce": "restricted",
            "pod-security.kubernetes.io/enforce-version": version,
        }
        kube.core.create_namespace({"metadata": {"name": name, "labels": labels}})
        wait_for(lambda name=name: kube.core.read_namespaced_service_account("default", name), "its service account")
        exposed = {"hostNetwork": True, "containers": [{"name": "engine", "image": "i"}]}
        wait_for(
            lambda name=name, exposed=exposed: "violates PodSecurity" in refusal_of(kube, name, {"spec": exposed}),
            "the API server applies the label",
        )
    yield made
    for name in made.values():
        kube.core.delete_namespace(name)


def refusal_of(kube: Any, namespace: str, pod: Any) -> str:
    """Return the API server's error about a pod; empty if it is accepted."""
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    # Bypasses the client's models, which would validate too.
    request = kube.api.param_serialize("POST", path, header_params=headers, body={"metadata": {"name": "demo"}, **pod})
    response = kube.api.call_api(*request)
    answer = json.loads(response.read())
    return "" if response.status == 201 else str(answer["message"])


def test_permitted_templates_meet_the_restricted_standard(kube: Any, confined: Any, document: Any) -> None:
    counts = {"permitted": 0, "taken": 0, "refused by both": 0, "refused by us alone": 0}

    @settings(
        max_examples=600,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(spec=pods, notes=annotations)
    def evaluate(spec: Any, notes: Any) -> None:
        template = {"spec": spec, "metadata": {"annotations": notes}} if notes else {"spec": spec}
        against = forbidden(PodTemplate.model_validate(copy.deepcopy(template)), "Restricted")
        try:
            objects = render(parse(document(template=template)), Catalogue.load())
        except Refused:
            return  # the template sets a field of the spec again
        made = next(each for each in objects if each["kind"] == "Deployment")["spec"]["template"]
        made["spec"]["serviceAccountName"] = "default"
        pod = {"metadata": {"name": "demo", **made["metadata"]}, "spec": made["spec"]}
        messages = [refusal_of(kube, namespace, pod) for namespace in confined.values()]
        restricted = [text for text in messages if "violates PodSecurity" in text]
        if against:
            counts["refused by both" if restricted else "refused by us alone"] += 1
            return
        assert not restricted, (template, restricted)
        counts["permitted"] += 1
        counts["taken"] += messages == ["", ""]

    evaluate()
    # Each outcome must be frequent enough for the comparison to mean something.
    assert counts["permitted"] > 150, counts
    assert counts["taken"] > 150, counts
    assert counts["refused by both"] > 50, counts


def test_a_stricter_policy_stops_nothing_that_runs(
    kube: Any,
    operators_kubeconfig: Path,
    sleeping_operator: Any,
    ns: str,
    document: Any,
    eventually: Any,
    tmp_path: Path,
) -> None:
    sleeping_operator.stop()
    policy = tmp_path / "policy.yaml"
    policy.write_text("template: Full\n")
    flag = f"--policy={policy}"
    with Operator(operators_kubeconfig, tmp_path / "full.log", flag):
        kube.create(ns, document(template={"spec": {"hostPID": True, "priorityClassName": "system-node-critical"}}))
        eventually(lambda: kube.pods(ns, "demo") or None, "its pods are made")
    before = kube.deployment(ns, "demo")
    assert before["spec"]["template"]["spec"]["hostPID"] is True
    lives = {pod.metadata.uid for pod in kube.pods(ns, "demo")}

    policy.write_text("template: Restricted\nnetworkPolicyFrom:\n- namespaceSelector: {}\n")
    with Operator(operators_kubeconfig, tmp_path / "restricted.log", flag):
        refused = eventually(
            lambda: (found := kube.condition(ns, "demo")).get("reason") == "TemplateNotPermitted" and found,
            "it is refused",
        )
        assert "spec.template.spec.hostPID: policy.template Restricted" in refused["message"]
        assert "spec.template.spec.priorityClassName: policy.template Restricted" in refused["message"]
        after = kube.deployment(ns, "demo")
        assert (after["metadata"]["generation"], after["spec"]) == (before["metadata"]["generation"], before["spec"])
        assert {pod.metadata.uid for pod in kube.pods(ns, "demo")} == lives
        kube.patch(ns, "demo", {"template": None})
        eventually(lambda: kube.condition(ns, "demo", "Accepted").get("status") == "True", "what is permitted is made")
        assert "hostPID" not in kube.deployment(ns, "demo")["spec"]["template"]["spec"]
        (rule,) = kube.get(f"/apis/networking.k8s.io/v1/namespaces/{ns}/networkpolicies/demo")["spec"]["ingress"]
        assert rule["from"] == [{"podSelector": {}}, {"namespaceSelector": {}}]
