"""What a Restricted template must not contain, field by field.

In e2e/apiserver, a real API server checks that the permitted templates are what Kubernetes calls restricted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stoker_operator.api.v1alpha1.template import PodTemplate
from stoker_operator.api.violation import Refused
from stoker_operator.cli.render import main
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.policy.policy import Policy
from stoker_operator.policy.template_policy import forbidden
from stoker_operator.reconcile.evaluate import PlanningContext, evaluate

ROOT = Path(__file__).parents[3]
SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SIDECAR = {"name": "sidecar", "image": "s", "securityContext": SAFE}


def sidecar(**more: Any) -> dict[str, Any]:
    return {"containers": [{**SIDECAR, **more}]}


def engine(**more: Any) -> dict[str, Any]:
    return {"containers": [{"name": "engine", **more}]}


def secure(**more: Any) -> dict[str, Any]:
    return sidecar(securityContext={**SAFE, **more})


#: Violations of the standard, by the field in the message.
ESCAPES: dict[str, dict[str, Any]] = {
    "hostPID": {"hostPID": True},
    "hostIPC": {"hostIPC": True},
    "hostNetwork": {"hostNetwork": True},
    "nodeName": {"nodeName": "n"},
    "serviceAccountName": {"serviceAccountName": "admin"},
    "serviceAccount": {"serviceAccount": "admin"},
    "automountServiceAccountToken": {"automountServiceAccountToken": True},
    "priorityClassName": {"priorityClassName": "system-node-critical"},
    "priority": {"priority": 2000000000},
    "preemptionPolicy": {"preemptionPolicy": "PreemptLowerPriority"},
    "ephemeralContainers": {"ephemeralContainers": [SIDECAR]},
    "os": {"os": {"name": "windows"}},
    "overhead": {"overhead": {"cpu": "1"}},
    "aFieldOfTheFuture": {"aFieldOfTheFuture": True},
    "$patch": {"$patch": "replace"},
    "securityContext.runAsNonRoot": {"securityContext": {"runAsNonRoot": False}},
    "securityContext.runAsUser": {"securityContext": {"runAsUser": 0}},
    "securityContext.seccompProfile": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "securityContext.appArmorProfile": {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}},
    "securityContext.seLinuxOptions": {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}},
    "securityContext.sysctls": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    "securityContext.windowsOptions": {"securityContext": {"windowsOptions": {"hostProcess": True}}},
    "volumes[0].hostPath": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]},
    "volumes[1].nfs": {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "cache", "nfs": {"server": "s"}}]},
    "volumes[0].projected.sources[1].serviceAccountToken": {
        "volumes": [
            {"name": "t", "projected": {"sources": [{"secret": {"name": "s"}}, {"serviceAccountToken": {"path": "t"}}]}}
        ]
    },
    "volumes[0].projected.sources[0].podCertificate": {
        "volumes": [{"name": "t", "projected": {"sources": [{"podCertificate": {"signerName": "s"}}]}}]
    },
    "containers[0].securityContext.privileged": engine(securityContext={"privileged": True}),
    "containers[0].securityContext.allowPrivilegeEscalation": engine(
        securityContext={"allowPrivilegeEscalation": True}
    ),
    "containers[0].securityContext.capabilities": engine(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    "containers[0].securityContext.runAsUser": secure(runAsUser=0),
    "containers[0].securityContext.runAsNonRoot": secure(runAsNonRoot=False),
    "containers[0].securityContext.procMount": secure(procMount="Unmasked"),
    "containers[0].securityContext.seccompProfile": secure(seccompProfile={"type": "Unconfined"}),
    "containers[0].securityContext.appArmorProfile": secure(appArmorProfile={"type": "Unconfined"}),
    "containers[0].securityContext.seLinuxOptions": secure(seLinuxOptions={"user": "system_u"}),
    "containers[0].securityContext.windowsOptions": secure(windowsOptions={}),
    "containers[0].ports[1].hostPort": sidecar(ports=[{"containerPort": 1}, {"containerPort": 2, "hostPort": 22}]),
    "containers[0].readinessProbe.httpGet.host": sidecar(readinessProbe={"httpGet": {"host": "169.254.169.254"}}),
    "containers[0].livenessProbe.tcpSocket.host": engine(livenessProbe={"tcpSocket": {"host": "h", "port": 1}}),
    "containers[0].lifecycle.preStop.httpGet.host": engine(
        lifecycle={"preStop": {"httpGet": {"host": "h", "port": 1}}}
    ),
    "containers[0].aFieldOfTheFuture": engine(aFieldOfTheFuture=1),
    "initContainers[0].securityContext.privileged": {
        "initContainers": [{**SIDECAR, "securityContext": {**SAFE, "privileged": True}}]
    },
}


@pytest.mark.parametrize(("field", "spec"), ESCAPES.items(), ids=list(ESCAPES))
def test_forbidden_fields_are_refused_by_name(field: str, spec: Any) -> None:
    (violation,) = forbidden(PodTemplate(spec=spec), "Restricted")
    assert violation.field == f"spec.template.spec.{field}"
    assert "policy.template Restricted" in violation.message
    assert "or ask an administrator to set the Helm chart's value policy.template to Full" in violation.remedy
    assert violation.reason == "TemplateNotPermitted"
    assert forbidden(PodTemplate(spec=spec), "Full") == ()


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_additional_containers_need_the_fields_of_the_standard(kind: str) -> None:
    """The engine's container has the required fields by default; init containers do not."""
    name = "engine" if kind == "initContainers" else "sidecar"
    found = forbidden(PodTemplate(spec={kind: [{"name": name, "image": "i"}]}), "Restricted")
    assert [each.field.removeprefix(f"spec.template.spec.{kind}[0].securityContext.") for each in found] == [
        "allowPrivilegeEscalation",
        "capabilities.drop",
    ]
    assert [each.remedy.partition(",")[0] for each in found] == ["set it to false", "set it to [ALL]"]
    assert forbidden(PodTemplate(spec=engine(securityContext={"runAsUser": 5})), "Restricted") == ()


def test_null_fields_count_as_absent() -> None:
    assert (
        forbidden(PodTemplate(spec={"hostPID": None, "volumes": [{"name": "a", "hostPath": None}]}), "Restricted") == ()
    )
    unsaid = {"allowPrivilegeEscalation": None, "capabilities": {"drop": ["ALL"]}}
    assert len(forbidden(PodTemplate(spec=sidecar(securityContext=unsaid)), "Restricted")) == 1


@pytest.mark.parametrize(
    ("pod", "container"),
    [
        ({"securityContext": None}, {}),
        ({"securityContext": {"runAsNonRoot": None}}, {}),
        ({"securityContext": {"seccompProfile": None}}, {}),
        ({"securityContext": {"seccompProfile": {"type": None}}}, {}),
        ({"serviceAccountName": None}, {}),
        ({"automountServiceAccountToken": None}, {}),
        ({}, {"securityContext": None}),
        ({}, {"securityContext": {"allowPrivilegeEscalation": None}}),
        ({}, {"securityContext": {"capabilities": None}}),
        ({}, {"securityContext": {"capabilities": {"drop": None}}}),
    ],
)
def test_null_cannot_remove_a_field_that_makes_a_pod_restricted(pod: Any, container: Any) -> None:
    spec = {**pod, **(engine(**container) if container else {})}
    found = forbidden(PodTemplate(spec=spec), "Restricted")
    assert found and all(each.reason == "TemplateNotPermitted" for each in found)
    assert forbidden(PodTemplate(spec=spec), "None")
    assert forbidden(PodTemplate(spec=spec), "Full") == ()


def test_null_may_leave_user_and_group_to_the_cluster() -> None:
    ids = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    assert forbidden(PodTemplate(spec={"securityContext": ids}), "Restricted") == ()
    assert forbidden(PodTemplate(spec=engine(securityContext={"runAsUser": None})), "Restricted") == ()


def test_apparmor_profiles_in_annotations_are_checked() -> None:
    def against(value: str) -> tuple[Any, ...]:
        name = "container.apparmor.security.beta.kubernetes.io/engine"
        template = PodTemplate.model_validate({"metadata": {"annotations": {name: value, "note": "unconfined"}}})
        return forbidden(template, "Restricted")

    assert [against(value) for value in ("runtime/default", "localhost/mine")] == [(), ()]
    (violation,) = against("unconfined")
    assert violation.field.startswith("spec.template.metadata.annotations[container.apparmor")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_permitted(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        template = document["spec"].get("template") if document.get("kind") == "InferenceEndpoint" else None
        if template:
            assert forbidden(PodTemplate.model_validate(template), "Restricted") == ()


def test_policy_none_permits_no_template() -> None:
    empty = [{}, {"spec": {}}, {"metadata": {}}, {"spec": {"nodeSelector": None}}]
    assert not [each for each in empty if forbidden(PodTemplate.model_validate(each), "None")]
    found = forbidden(
        PodTemplate.model_validate({"metadata": {"labels": {"a": "b"}}, "spec": {"tolerations": []}}), "None"
    )
    assert [each.field for each in found] == ["spec.template.metadata", "spec.template.spec"]
    assert "policy.template to Restricted" in found[0].remedy


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
field_names = st.sampled_from(["containers", "initContainers", "volumes", "securityContext", "hostPID"])


@given(spec=st.dictionaries(field_names, anything), inside=anything)
def test_malformed_templates_are_refused_with_the_field(spec: Any, inside: Any) -> None:
    names = ("securityContext", "ports", "lifecycle", "readinessProbe", "projected")
    nested = {"containers": [{"name": "a", **dict.fromkeys(names, inside)}], "volumes": [{"projected": inside}]}
    for given_spec in (spec, nested):
        for violation in forbidden(PodTemplate(spec=given_spec), "Restricted"):
            assert violation.field.startswith("spec.template.spec.")


def test_evaluation_refuses_forbidden_templates(document: Any) -> None:
    """The webhook refuses it, and so does a reconcile without webhook."""
    escape = document(template={"spec": {"hostPID": True}})
    for use, field in (("Restricted", "spec.template.spec.hostPID"), ("None", "spec.template.spec")):
        context = PlanningContext(Catalogue.load(), policy=Policy(template=use))
        evaluation = evaluate(Owner("demo", "default", "u"), escape, context)
        assert [each.field for each in evaluation.refused] == [field]
        assert evaluation.objects == ()
    assert evaluate(Owner("demo", "default", "u"), escape, PlanningContext(Catalogue.load())).objects


def test_policy_file_is_read_and_a_wrong_one_refused(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("template: None\nnetworkPolicyFrom:\n- namespaceSelector: {}\n")
    assert Policy.load(file).template == "None"
    assert main(["-f", str(ROOT / "examples/04-template.yaml"), "--policy", str(file)]) == 2
    assert "spec.template.spec: policy.template None permits no template" in capsys.readouterr().err
    assert Policy.load(None).template == "Full"
    for text, fault in (
        ("template: Some", "template"),
        ("templat: Full", "templat"),
        ("networkPolicyFrom: [{}]", "networkPolicyFrom[0]: a peer is either pods or addresses"),
        ("- a", "dictionary"),
        ("a: [", "the file cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(Refused, match="policy ") as refused:
            Policy.load(file)
        assert fault in str(refused.value), text
