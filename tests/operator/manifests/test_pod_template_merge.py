"""Merging of a user's pod template into the operator's."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_operator.api.v1alpha1 import InferenceEndpoint, Spec
from stoker_operator.api.violation import Refused
from stoker_operator.manifests.children import children
from stoker_operator.manifests.node_affinity import node_affinity
from stoker_operator.manifests.pod_template_merge import merge_pod_spec
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan
from stoker_operator.policy.policy import Policy

AFFINITY: Any = node_affinity({"gpu": ["a100", "a100-sxm"]})
OURS: dict[str, Any] = {
    "serviceAccountName": "demo",
    "securityContext": {"runAsNonRoot": True, "fsGroup": 65532},
    "terminationGracePeriodSeconds": 40,
    "affinity": AFFINITY,
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "containers": [
        {
            "name": "engine",
            "image": "x",
            "args": ["serve"],
            "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
            "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "failureThreshold": 2},
            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}, {"name": "tmp", "mountPath": "/tmp"}],
        }
    ],
    "volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "tmp", "emptyDir": {}}],
}


def merged(**patch: Any) -> Any:
    before = copy.deepcopy((OURS, patch))
    result = merge_pod_spec(OURS, patch)
    assert (OURS, patch) == before
    return result


def engine(**patch: Any) -> Any:
    return merged(containers=[{"name": "engine", **patch}])["containers"][0]


HANDLERS: dict[str, Any] = {
    "exec": {"command": ["true"]},
    "grpc": {"port": 9000},
    "httpGet": {"path": "/other"},
    "sleep": {"seconds": 5},
    "tcpSocket": {"port": 9000},
}


@pytest.mark.parametrize("field", ["livenessProbe", "readinessProbe", "startupProbe", "postStart", "preStop"])
@pytest.mark.parametrize("old_kind", HANDLERS)
@pytest.mark.parametrize("new_kind", HANDLERS)
def test_merged_probe_or_hook_has_a_single_handler(field: str, old_kind: str, new_kind: str) -> None:
    times = {"failureThreshold": 2}
    base = copy.deepcopy(OURS)
    patch: Any = {field: {new_kind: HANDLERS[new_kind], "periodSeconds": 3}}
    base_probe: Any = {field: {old_kind: {**HANDLERS[old_kind], "mine": 1}, **times}}
    hook = field in ("postStart", "preStop")
    base["containers"][0] |= {"lifecycle": base_probe} if hook else base_probe
    merged_spec = merge_pod_spec(
        base, {"containers": [{"name": "engine", **({"lifecycle": patch} if hook else patch)}]}
    )
    container = merged_spec["containers"][0]
    result = (container["lifecycle"] if hook else container)[field]
    kept = {"mine": 1} if old_kind == new_kind else {}
    assert result == {new_kind: {**HANDLERS[new_kind], **kept}, **times, "periodSeconds": 3}
    assert base["containers"][0]["image"] == container["image"]


def test_probe_times_change_without_the_handler() -> None:
    probe = engine(readinessProbe={"periodSeconds": 3, "exec": None})["readinessProbe"]
    assert probe == {**OURS["containers"][0]["readinessProbe"], "periodSeconds": 3}


def test_merged_variable_or_volume_has_a_single_source() -> None:
    base = copy.deepcopy(OURS)
    base["containers"].append({"name": "more", "env": [{"name": "A", "value": "1"}]})
    source = {"secretKeyRef": {"name": "s", "key": "k"}}
    merged_spec = merge_pod_spec(
        base,
        {
            "containers": [{"name": "more", "env": [{"name": "A", "valueFrom": source}]}],
            "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "c"}}],
        },
    )
    assert merged_spec["containers"][1]["env"] == [{"name": "A", "valueFrom": source}]
    assert merged_spec["volumes"][0] == {"name": "cache", "persistentVolumeClaim": {"claimName": "c"}}


def test_empty_patch_changes_nothing() -> None:
    assert merged() == OURS
    assert merged(containers=[{"name": "engine"}], tolerations=[], volumes=[], affinity={}) == OURS
    assert merged(nodeSelector=None, containers=None) == OURS


@pytest.mark.parametrize(
    "path",
    [
        ["serviceAccountName"], ["tolerations"], ["affinity"], ["affinity", "nodeAffinity"],
        ["securityContext"], ["securityContext", "fsGroup"], ["securityContext", "runAsNonRoot"],
    ],
    ids=".".join,
)  # fmt: skip
def test_null_removes_a_default(path: list[str]) -> None:
    patch: Any = None
    for name in reversed(path):
        patch = {name: patch}
    expected = copy.deepcopy(OURS)
    at = expected
    for name in path[:-1]:
        at = at[name]
    del at[path[-1]]
    assert merged(**patch) == expected
    assert merged(**patch | {"nodeSelector": {"a": None, "b": "c"}}) == expected | {"nodeSelector": {"b": "c"}}


def test_null_removes_no_field_that_the_operator_needs() -> None:
    for name in ("image", "args", "ports", "volumeMounts", "resources", "env", "terminationMessagePolicy"):
        assert engine(**{name: None}) == OURS["containers"][0]
    assert merged(volumes=None, terminationGracePeriodSeconds=None) == OURS
    assert "readinessProbe" not in engine(readinessProbe=None)
    assert engine(readinessProbe={"failureThreshold": None})["readinessProbe"] == {
        "httpGet": {"path": "/ready", "port": "http"}
    }


@pytest.mark.parametrize("runtime", ["stoker", "vllm"])
def test_user_and_group_ids_may_be_left_to_the_cluster(document: Any, catalogue: Catalogue, runtime: str) -> None:
    def context(policy: Policy, **template: Any) -> Any:
        spec = InferenceEndpoint.model_validate(
            document(
                model={"source": "hf://org/model"},
                engine={"runtime": runtime, "image": "x"},
                template={"spec": template},
            )
        ).spec
        made = children(Owner("demo"), spec, plan(spec, catalogue, None), policy=policy)
        (deployment,) = (each for each in made if each["kind"] == "Deployment")
        return deployment["spec"]["template"]["spec"]["securityContext"]

    security_context = context(Policy())
    assert security_context["fsGroup"] == 65532
    without_ids = {key: value for key, value in security_context.items() if key not in ("fsGroup", "runAsUser")}
    assert context(Policy.of({"podIds": "Cluster"}, "policy")) == without_ids
    assert context(Policy(), securityContext={"fsGroup": None, "runAsUser": None}) == without_ids


def test_maps_are_merged_and_the_users_value_wins() -> None:
    result = merged(securityContext={"fsGroup": 1, "runAsUser": 7}, serviceAccountName="mine", hostIPC=True)
    assert result["securityContext"] == {"runAsNonRoot": True, "fsGroup": 1, "runAsUser": 7}
    assert (result["serviceAccountName"], result["hostIPC"]) == ("mine", True)


def test_engine_container_is_merged_and_others_are_added() -> None:
    result = merged(
        containers=[
            {"name": "sidecar", "image": "y"},
            {
                "name": "engine",
                "volumeMounts": [{"name": "mine", "mountPath": "/cache"}, {"name": "mine", "mountPath": "/more"}],
                "ports": [{"containerPort": 9000}],
                "readinessProbe": {"failureThreshold": 5},
            },
        ]
    )
    engine_result, sidecar = result["containers"]
    assert sidecar == {"name": "sidecar", "image": "y"}
    assert engine_result["image"] == "x"
    assert engine_result["readinessProbe"] == {"httpGet": {"path": "/ready", "port": "http"}, "failureThreshold": 5}
    assert engine_result["ports"] == [
        {"name": "http", "containerPort": 8000, "protocol": "TCP"},
        {"containerPort": 9000, "protocol": "TCP"},
    ]
    assert engine_result["volumeMounts"] == [
        {"name": "mine", "mountPath": "/cache"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "mine", "mountPath": "/more"},
    ]


def test_volume_replaces_the_source_of_a_volume_of_its_name() -> None:
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": "c"}}
    assert merged(volumes=[claim])["volumes"] == [claim, {"name": "tmp", "emptyDir": {}}]


def test_tolerations_are_added() -> None:
    more = {"key": "team", "value": "a"}
    assert merged(tolerations=[more, OURS["tolerations"][0]])["tolerations"] == [*OURS["tolerations"], more]


def required(terms: Any) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def expression(key: str, *values: str) -> dict[str, Any]:
    return (
        {"key": key, "operator": "In", "values": list(values)} if values else {"key": key, "operator": "DoesNotExist"}
    )


def fits(node: dict[str, str], spec: dict[str, Any]) -> bool:
    """Kubernetes' rule: one term must match with all of its expressions."""
    selector = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    def holds(each: dict[str, Any]) -> bool:
        return (
            each["key"] not in node if each["operator"] == "DoesNotExist" else node.get(each["key"]) in each["values"]
        )

    return any(all(map(holds, term["matchExpressions"])) for term in selector["nodeSelectorTerms"])


expressions = st.builds(
    lambda key, values: expression(key, *values), st.sampled_from("ab"), st.lists(st.sampled_from("xy"), max_size=2)
)
terms = st.lists(st.lists(expressions, min_size=1, max_size=2), min_size=1, max_size=3)
nodes = st.dictionaries(st.sampled_from(["a", "b", "gpu"]), st.sampled_from(["x", "y", "a100", "t4"]))


@given(patch=terms, node=nodes)
def test_node_must_match_both_affinities(patch: Any, node: dict[str, str]) -> None:
    affinity = required([{"matchExpressions": term} for term in patch])
    joined = merged(affinity=affinity)
    assert fits(node, joined) == (fits(node, OURS) and fits(node, {"affinity": affinity}))


@given(node=nodes)
def test_accelerator_label_restricts_only_labelled_nodes(node: dict[str, str]) -> None:
    assert fits(node, OURS) == (node.get("gpu") in ("a100", "a100-sxm", None))


def test_node_fields_are_merged_into_every_term() -> None:
    field = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    result = merged(affinity={**required([{"matchFields": [field]}]), "podAntiAffinity": {}})
    selector = result["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["matchFields"] for term in selector["nodeSelectorTerms"]] == [[field], [field]]
    assert "podAntiAffinity" in result["affinity"]


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (
            {"terminationGracePeriodSeconds": 1},
            "spec.template.spec.terminationGracePeriodSeconds: spec.rollout.drainSec",
        ),
        (
            {"containers": [{"name": "engine", "image": "y"}]},
            "spec.template.spec.containers[0].image: spec.engine.image sets this field; set spec.engine.image instead",
        ),
        (
            {"containers": [{"name": "a"}, {"name": "engine", "args": []}]},
            "spec.template.spec.containers[1].args: spec.",
        ),
        ({"containers": [{"name": "engine", "env": []}]}, "spec.template.spec.containers[0].env: spec.engine.env sets"),
        (
            {"containers": [{"name": "engine", "resources": {}}]},
            "spec.template.spec.containers[0].resources: spec.hardw",
        ),
        (
            {"containers": [{"name": "engine", "terminationMessagePolicy": "File"}]},
            "spec.template.spec.containers[0].terminationMessagePolicy: with another value, the operator could",
        ),
        (
            {"containers": [{"name": "engine", "ports": [{"containerPort": 8000, "name": "web"}]}]},
            "spec.template.spec.containers[engine].ports: port 8000 is the engine's; its name http and protocol cannot "
            "change",
        ),
        ({"containers": [{"image": "y"}]}, "spec.template.spec.containers[0]: the item lacks name; set it"),
        ({"containers": [{"name": ["engine"]}]}, "spec.template.spec.containers[0]: the item lacks name; set it"),
        ({"containers": {"name": "engine"}}, "spec.template.spec.containers: must be a list, not {'name': 'engine'}"),
        ({"containers": ["engine"]}, "spec.template.spec.containers[0]: must be an object, not 'engine'"),
        (
            {"containers": [{"name": "engine", "ports": 1}]},
            "spec.template.spec.containers[0].ports: must be a list, not 1",
        ),
        (
            {"containers": [{"name": "engine", "ports": [1]}]},
            "spec.template.spec.containers[0].ports[0]: must be an object",
        ),
        ({"securityContext": "none"}, "spec.template.spec.securityContext: must be an object, not 'none'"),
        ({"tolerations": {}}, "spec.template.spec.tolerations: must be a list, not {}"),
        ({"affinity": []}, "spec.template.spec.affinity: must be an object, not []"),
        (
            {
                "affinity": {
                    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": 1}}
                }
            },
            "spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
        ),
        (
            {
                "affinity": {
                    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [1]}}
                }
            },
            "spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
        ),
        (
            {"volumes": [{"$patch": "delete"}]},
            "spec.template.spec.volumes[0].$patch: this is a directive of kubectl pat",
        ),
    ],
)
def test_patches_that_cannot_be_merged_are_refused(patch: Any, expected: str) -> None:
    with pytest.raises(Refused) as refused:
        merge_pod_spec(OURS, patch)
    assert str(refused.value).startswith(expected)


anything: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["containers", "volumes", "tolerations", "affinity", "securityContext", "initContainers"])


@given(patch=st.dictionaries(names, anything))
def test_malformed_patch_is_refused_or_left_to_the_api_server(patch: Any) -> None:
    try:
        merge_pod_spec(OURS, patch)
    except Refused as refused:
        assert all(violation.field.startswith("spec.template.spec") for violation in refused.violations)


@given(patch=anything)
def test_malformed_sidecar_is_refused_or_left_to_the_api_server(patch: Any) -> None:
    try:
        merge_pod_spec(OURS, {"containers": [{"name": "sidecar", "ports": patch}], "initContainers": patch})
    except Refused as refused:
        assert all(violation.field.startswith("spec.template.spec.") for violation in refused.violations)


@given(patch=anything)
def test_malformed_engine_container_is_refused_or_left_to_the_api_server(patch: Any) -> None:
    container = {"name": "engine", "ports": patch, "volumeMounts": patch, "readinessProbe": patch}
    try:
        merge_pod_spec(OURS, {"containers": [container]})
    except Refused as refused:
        assert all(violation.field.startswith("spec.template.spec.containers") for violation in refused.violations)


#: Text for any field of a pod.
words = st.sampled_from(
    [
        *("containers", "initContainers", "volumes", "tolerations", "affinity", "nodeSelector", "securityContext"),
        *("imagePullSecrets", "name", "env", "ports", "volumeMounts", "mountPath", "nodeAffinity", "containerPort"),
        *(
            "requiredDuringSchedulingIgnoredDuringExecution",
            "nodeSelectorTerms",
            "matchExpressions",
            "key",
            "lifecycle",
        ),
        *("hostAliases", "resources", "livenessProbe", "protocol"),
    ]
)
pods: Any = st.recursive(
    st.sampled_from(["engine", "a", 8000, 0, -1, True, None, 1.5, ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(patch=st.dictionaries(words, pods, max_size=4))
def test_any_template_is_rendered_or_refused(patch: Any) -> None:
    hardware = {"accelerator": "nvidia-l4"}
    spec = Spec.model_validate(
        {
            "model": {"source": "hf://org/name"},
            "hardware": hardware,
            "engine": {"image": "x"},
            "template": {"spec": patch},
        }
    )
    try:
        made = children(Owner("demo"), spec, plan(spec, Catalogue.load()))
    except Refused as refused:
        assert all(violation.field.startswith("spec.template.spec") for violation in refused.violations)
    else:
        json.dumps(made)
