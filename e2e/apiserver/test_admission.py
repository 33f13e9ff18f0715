"""The API server's validation by schema and CEL, compared with that of `stoker up` and `stoker plan`."""

from __future__ import annotations

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1.crd import crd
from stoker_operator.api.violation import Refused

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.operator.api.rule_breakers import RULE_BREAKERS
from tests.operator.api.schema_faults import generated
from tests.operator.api.spec_cases import GPUS, RIGHT, Wrong
from tests.operator.api.spec_changes import CHANGES, Change

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
ENDPOINTS = ("stoker.dev", "v1alpha1", "inferenceendpoints")


def refusal(kube: Any, document: Any) -> str:
    """Return the API server's error about a manifest; empty if it is accepted."""
    try:
        kube.create("default", document, dry_run="All", field_validation="Strict")
    except client.ApiException as error:
        return message_of(error)
    return ""


def message_of(error: client.ApiException) -> str:
    message: str = json.loads(error.body)["message"]
    return message


def listed(kube: Any, namespace: str) -> Any:
    """Return the table that `kubectl get` shows."""
    group, version, plural = ENDPOINTS
    header = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    path = f"/apis/{group}/{version}/namespaces/{namespace}/{plural}"
    return json.loads(kube.api.call_api(*kube.api.param_serialize("GET", path, header_params=header)).read())


@pytest.mark.parametrize("spec", RIGHT.values(), ids=RIGHT)
def test_valid_specs_are_accepted(kube: Any, document: Any, spec: Any) -> None:
    assert refusal(kube, document(**spec)) == ""


@pytest.mark.parametrize("wrong", RULE_BREAKERS, ids=lambda wrong: wrong.name)
def test_rule_breakers_are_refused_with_the_same_message(kube: Any, document: Any, wrong: Wrong) -> None:
    message = refusal(kube, document(**wrong.spec))
    assert wrong.field in message
    assert wrong.sentence in message


def test_wrong_fields_are_named(kube: Any, document: Any) -> None:
    """The API server refuses a thousand wrong manifests; tests/operator checks that Python blames the same fields."""
    wrongs = list(generated(SCHEMA))
    with ThreadPoolExecutor(8) as threads:
        messages = list(threads.map(lambda wrong: refusal(kube, {**document(), "spec": wrong.spec}), wrongs))
    assert len(messages) > 900
    for wrong, refused in zip(wrongs, messages, strict=True):
        assert wrong.field in refused, wrong.name


@pytest.mark.parametrize("name", ["1demo", "de.mo", "a" * 53])
def test_a_wrong_name_is_refused(kube: Any, document: Any, name: str) -> None:
    assert "metadata.name: Invalid value: this name is not valid for an Infer" in refusal(kube, document(name))


def test_absent_fields_are_not_written_into_the_object(kube: Any, document: Any, ns: str) -> None:
    created = kube.create(ns, document(hardware=GPUS, parallelism={"tensor": 2}, engine=None, service=None))
    assert created["spec"] == {
        "model": {"source": "demo://gemma-3-270m"},
        "replicas": 1,
        "hardware": GPUS,
        "parallelism": {"tensor": 2},
    }


def test_pod_template_is_stored_unchanged(kube: Any, document: Any, ns: str) -> None:
    template = {"spec": {"tolerations": [{"operator": "Exists"}], "volumes": [{"name": "a", "emptyDir": {}}]}}
    assert kube.create(ns, document(template=template))["spec"]["template"] == template


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_cache_is_immutable_except_for_its_size(kube: Any, document: Any, ns: str, change: Change) -> None:
    was = kube.create(ns, document(storage=change.before))
    now = copy.deepcopy(was)
    now["spec"].pop("storage", None)
    now["spec"] |= {"storage": change.after} if change.after else {}
    try:
        kube.custom.replace_namespaced_custom_object(*ENDPOINTS[:2], ns, ENDPOINTS[2], "demo", now)
        message = ""
    except client.ApiException as refused:
        message = message_of(refused)
    assert (f"{change.field}: Invalid value: {change.sentence}" in message) if change.field else message == ""


def test_all_fields_except_the_cache_can_be_changed(kube: Any, document: Any, ns: str) -> None:
    """Change each valid spec without a cache to the next one."""
    was = kube.create(ns, document())
    for name, spec in RIGHT.items():
        if "cache" in spec.get("storage", {}):
            continue
        now = copy.deepcopy(was)
        now["spec"] = spec
        was = kube.custom.replace_namespaced_custom_object(*ENDPOINTS[:2], ns, ENDPOINTS[2], "demo", now)
        parse(now, was)
        assert was["spec"].items() >= spec.items(), name


def test_kubectl_explain_explains_every_field(kube: Any) -> None:
    published = kube.get("/openapi/v3/apis/stoker.dev/v1alpha1")["components"]["schemas"]
    endpoint = published["dev.stoker.v1alpha1.InferenceEndpoint"]["properties"]

    def explained(node: Any) -> int:
        inner = node.get("properties", {}) | {name: node[name] for name in ("items",) if name in node}
        assert all("description" in field for name, field in inner.items() if name != "items"), node
        return len(inner) + sum(map(explained, inner.values()))

    assert explained(endpoint["spec"]) > 100
    assert explained(endpoint["status"]) > 30


def test_kubectl_table_shows_the_endpoints_state(kube: Any, document: Any, ns: str, sleeping_operator: Any) -> None:
    sleeping_operator.stop()  # an operator would replace the status
    kube.create(ns, document(replicas=2))
    condition = {"lastTransitionTime": "2026-01-01T00:00:00Z", "message": "no node", "observedGeneration": 1}
    status = {
        "url": "http://demo.default.svc:8000/v1",
        "addresses": [{"name": "cluster", "url": "http://demo.default.svc:8000/v1"}],
        "workloads": [
            {
                "name": "main",
                "runtime": "stoker",
                "image": "stoker/engine-cpu:0.1.0",
                "plan": {"tensor": 2, "pipeline": 1, "data": 4, "weightBytesPerGpu": 2**36, "kvTokensPerCopy": 2**33},
                "engine": {"args": ["serve"], "kvBlocks": 7},
            }
        ],
        "conditions": [{"type": "Ready", "status": "False", "reason": "Unschedulable", **condition}],
        "selector": "a=b",
        "replicas": 3,
        "updatedReplicas": 2,
        "availableReplicas": 1,
        "desiredReplicas": 2,
        "scaling": {"phase": "Draining", "drain": "5f0c", "replicas": 2, "startSeconds": 12.5, "startFailure": "no"},
    }
    kube.custom.patch_namespaced_custom_object_status(
        *ENDPOINTS[:2], ns, ENDPOINTS[2], "demo", {"status": status}, _content_type="application/merge-patch+json"
    )
    assert kube.endpoint(ns, "demo")["status"] == status
    table = listed(kube, ns)
    shown = dict(zip([each["name"] for each in table["columnDefinitions"]], table["rows"][0]["cells"], strict=True))
    assert shown | {"Age": "", "Message": ""} == {
        "Name": "demo",
        "Model": "demo://gemma-3-270m",
        "Runtime": "stoker",
        "Accelerator": "cpu",
        "TP": 2,
        "DP": 4,
        "Desired": 2,
        "Available": 1,
        "Ready": "False",
        "URL": "http://demo.default.svc:8000/v1",
        "Reason": "Unschedulable",
        "Age": "",
        "Updated": 2,
        "Message": "",
    }
    scale = kube.get(f"/apis/stoker.dev/v1alpha1/namespaces/{ns}/inferenceendpoints/demo/scale")
    assert (scale["spec"], scale["status"]) == ({"replicas": 2}, {"replicas": 3, "selector": "a=b"})


# Specs for both validators: mostly valid, with errors of all kinds that the rules cover.
words = st.sampled_from(["a", "b", "A/b", "", "-x"])
amounts = st.sampled_from([-1, 0, 0, 1, 2, "0%", "0%", "25%", "00%", "101%", "1"])
modes = st.sampled_from(["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "No"])
refs = st.fixed_dictionaries({"name": st.sampled_from(["a", "B"]), "key": st.just("k")})
specs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {
                "source": st.sampled_from(
                    ["demo://gemma-3-270m", "demo://x", "hf://a/b", "hf://a", "pvc://a/b", "pvc://a/..", "pvc://a/../b",
                     "file:///a", "file://a", "", "hf://a/b\n"]
                )
            },
            optional={
                "revision": words,
                "servedNames": st.lists(words, max_size=3),
                "tokenSecretRef": refs,
                "chatTemplate": st.fixed_dictionaries({}, optional={"value": words, "configMapKeyRef": refs}),
            },
        ),
        "hardware": st.fixed_dictionaries(
            {"accelerator": st.sampled_from(["cpu", "nvidia-l4", "nvidia-h100-80gb", "Bad"])},
            optional={
                "count": st.sampled_from([0, 1, 2, 3, 4, 8, 60, 64, 65]),
                "nodes": st.sampled_from([1, 1, 2, 3, 33]),
                "allowIdle": st.booleans(),
                "resources": st.fixed_dictionaries(
                    {}, optional={"limits": st.dictionaries(st.just("cpu"), st.sampled_from([1, "500m", "x", "1 Gi"]))}
                ),
            },
        ),
    },
    optional={
        "replicas": st.sampled_from([0, 1, 3, -1]),
        "scaling": st.fixed_dictionaries(
            {
                "maxReplicas": st.sampled_from([0, 1, 2, 10001]),
                "target": st.sampled_from([0, 0.5, 1, 1.0, 8, 15.9, "1"]),
            },
            optional={
                "minReplicas": st.sampled_from([0, 1, 2, -1]),
                "metric": st.sampled_from(["pendingRequests", "runningRequests", "kvCacheUsage", "load"]),
                "idleSecondsToZero": st.sampled_from([0, 1, 300]),
                "behavior": st.sampled_from([{}, {"scaleUp": {"tolerance": 0}}, {"scaleDown": {"policies": []}}]),
            },
        ),
        "parallelism": st.fixed_dictionaries(
            {},
            optional={
                "tensor": st.sampled_from([1, 2, 3, 4, 8, 64]),
                "data": st.sampled_from([1, 2, 3, 4, 8, 64]),
                "pipeline": st.sampled_from([1, 2, 3, 128]),
                "expert": st.sampled_from([1, 4, 129]),
            },
        ),
        "engine": st.fixed_dictionaries(
            {},
            optional={
                "runtime": st.sampled_from(["stoker", "vllm"]),
                "kvCacheDtype": st.sampled_from(["auto", "fp8", "fp8_e4m3", "int3"]),
                "maxNumSeqs": st.sampled_from([0, 1, 8, 2**31 - 1, 2**31]),
                "gpuMemoryUtilizationPercent": st.sampled_from([0, 1, 92, 100, 101]),
                "env": st.lists(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from(["A", "B.c", "1"])},
                        optional={
                            "value": words,
                            "valueFrom": st.fixed_dictionaries(
                                {}, optional={"secretKeyRef": refs, "fieldRef": st.just({"fieldPath": "metadata.name"})}
                            ),
                        },
                    ),
                    max_size=2,
                ),
            },
        ),
        "storage": st.fixed_dictionaries(
            {},
            optional={
                "cache": st.fixed_dictionaries(
                    {},
                    optional={
                        "emptyDir": st.sampled_from([{}, {"sizeLimit": "1Gi"}, {"sizeLimit": "much"}]),
                        "persistentVolumeClaim": st.just({"claimName": "a"}),
                        "volumeClaimTemplate": st.builds(
                            lambda granted, size: {"spec": {"accessModes": granted, "resources": {"requests": size}}},
                            st.lists(modes, max_size=2),
                            st.sampled_from([{"storage": "1Gi"}, {"storage": 1}, {"cpu": 1}, {}]),
                        ),
                    },
                )
            },
        ),
        "rollout": st.fixed_dictionaries(
            {}, optional={"maxSurge": amounts, "maxUnavailable": amounts, "drainSeconds": st.integers(-1, 1)}
        ),
        "template": st.fixed_dictionaries(
            {},
            optional={
                "metadata": st.fixed_dictionaries(
                    {}, optional={"labels": st.dictionaries(st.sampled_from(["a", "stoker.dev/workload"]), words)}
                ),
                "spec": st.sampled_from([{}, {"anything": [1, {"goes": None}]}]),
            },
        ),
    },
)  # fmt: skip


@settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=specs)
def test_python_and_the_api_server_give_the_same_verdict(kube: Any, document: Any, spec: Any) -> None:
    manifest = document(**spec)
    api_server_message = refusal(kube, copy.deepcopy(manifest))
    try:
        parse(manifest)
        violations: tuple[Any, ...] = ()
    except Refused as refused:
        violations = refused.violations
    assert bool(api_server_message) == bool(violations), (
        f"the API server: {api_server_message or 'fine'}; we: {violations or 'fine'}"
    )
    for violation in violations:
        assert violation.field in api_server_message
        # A rule has the same message on both sides; messages about the schema itself differ.
        is_of_schema = violation.message.startswith(("this field is required", "input should be"))
        if violation.remedy and not is_of_schema:
            assert violation.sentence in api_server_message
