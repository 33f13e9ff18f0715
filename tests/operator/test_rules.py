"""Every rule refuses what it is for, names the field and the remedy, and lets the rest through."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_operator.api.manifest import parse, read
from stoker_operator.api.v1alpha1.parallelism import options, resolve
from stoker_operator.api.violation import Refused

GPUS = {"accelerator": "nvidia-h100-80gb", "count": 4}


def refusal(document: Any) -> list[str]:
    with pytest.raises(Refused) as refused:
        parse(document)
    return [str(violation) for violation in refused.value.violations]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"hardware": GPUS, "parallelism": {"tensor": 2, "data": 3}},
            "spec.parallelism: tensor (2) × data (3) needs 6 GPUs but hardware.count is 4; use tensor 4, data 1 or "
            "tensor 2, data 2 or tensor 1, data 4, or set hardware.count to 6",
        ),
        (
            {"hardware": GPUS, "parallelism": {"tensor": 1, "data": 1}},
            "spec.parallelism: tensor (1) × data (1) uses 1 of 4 GPUs, 3 would be idle; use tensor 4, data 1 or "
            "tensor 2, data 2 or tensor 1, data 4",
        ),
        (
            {"hardware": GPUS, "parallelism": {"tensor": 3}},
            "spec.parallelism: tensor (3) does not divide hardware.count (4); use tensor 4, data 1 or tensor 2, "
            "data 2 or tensor 1, data 4",
        ),
        (
            {"hardware": GPUS, "parallelism": {"data": 8}},
            "spec.parallelism: data (8) does not divide hardware.count (4); use",
        ),
        (
            {"hardware": {"accelerator": "nvidia-l4"}, "parallelism": {"tensor": 2}},
            "spec.parallelism: tensor (2) does not divide hardware.count (1); use tensor 1, data 1",
        ),
        (
            {"hardware": {"accelerator": "nvidia-l4"}, "parallelism": {"tensor": 64, "data": 64}},
            "spec.parallelism: tensor (64) × data (64) needs 4096 GPUs but hardware.count is 1; use tensor 1, data 1",
        ),
        (
            {"parallelism": {"tensor": 2}},
            "spec.parallelism: accelerator cpu runs one copy of the model, unsplit; remove parallelism",
        ),
        (
            {"hardware": {"accelerator": "cpu", "count": 2}},
            "spec.hardware.count: accelerator cpu is not counted: a pod is one; remove count",
        ),
        (
            {"engine": {"kvCacheDtype": "fp8"}},
            "spec.engine.kvCacheDtype: the engine has no fp8 key-value cache on accelerator cpu; use auto",
        ),
        (
            {"engine": {"kvCacheDtype": "int3"}},
            "spec.engine.kvCacheDtype: input should be 'auto', 'fp8', 'fp8_e5m2' or 'fp8_e4m3', not 'int3'",
        ),
        ({"model": {"source": "s3://bucket"}}, "spec.model.source: this is no model source; use hf://ORG/NAME"),
        ({"model": {"source": "hf://name"}}, "spec.model.source: this is no model source"),
        ({"model": {"source": "demo://other"}}, "spec.model.source: there is no such demo model; use demo://gemma-3"),
        ({"model": {"source": "pvc://a/../b"}}, "spec.model.source: the path leaves the claim"),
        (
            {"model": {"source": "file:///m", "revision": "main"}},
            "spec.model.revision: only hf:// sources have revisions; remove revision",
        ),
        (
            {"model": {"source": "file:///m", "servedNames": ["a", "a"]}},
            "spec.model.servedNames: a name is listed twice; list each name once",
        ),
        (
            {"model": {"source": "file:///m", "chatTemplate": {}}},
            "spec.model.chatTemplate: a chat template is given once; set either value or configMapKeyRef",
        ),
        (
            {"storage": {"cache": {}}},
            "spec.storage.cache: the cache is in one place; set either emptyDir or persistentVolumeClaim",
        ),
        (
            {"rollout": {"maxSurge": 0}},
            "spec.rollout: maxSurge 0 and maxUnavailable 0 leave no way to replace a pod; set maxUnavailable to 1",
        ),
        (
            {"engine": {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec"}}}]}},
            "spec.engine.env[0]: a variable has one value; set either value or valueFrom",
        ),
        (
            {"engine": {"env": [{"name": "A", "valueFrom": {}}]}},
            "spec.engine.env[0].valueFrom: a value comes from one place; set one of",
        ),
        ({"replicas": -1}, "spec.replicas: input should be greater than or equal to 0, not -1"),
        ({"replicas": "3"}, "spec.replicas: input should be a valid integer, not '3'"),
        ({"hardware": {}}, "spec.hardware.accelerator: this field is required; set it"),
        (
            {"hardware": {"accelerator": "cpu", "resources": {"limits": {"memory": "4 GB"}}}},
            "spec.hardware.resources.limits.memory: this is no amount such as 500m, 4 or 16Gi, not '4 GB'",
        ),
        (
            {"engine": {"kvcacheDtype": "auto"}},
            "spec.engine.kvcacheDtype: there is no such field; did you mean kvCacheD",
        ),
        ({"engine": {"env": [{"name": "A", "valu": "1"}]}}, "spec.engine.env[0].valu: there is no such field; did you"),
        ({"autoscaling": {}}, "spec.autoscaling: there is no such field; there are model, replicas, hardware"),
    ],
)
def test_a_wrong_spec_is_refused_with_field_and_remedy(document: Any, spec: Any, expected: str) -> None:
    messages = refusal(document(**spec))
    assert len(messages) == 1
    assert messages[0].startswith(expected)


@pytest.mark.parametrize("name", ["1demo", "Demo", "de.mo", "demo-", "a" * 53])
def test_a_name_that_no_service_can_have_is_refused(document: Any, name: str) -> None:
    manifest = document()
    manifest["metadata"]["name"] = name
    assert refusal(manifest)[0].startswith("metadata.name: this name cannot be that of a Service; use at most 52")


@pytest.mark.parametrize(
    "spec",
    [
        {"hardware": GPUS},
        {"hardware": GPUS, "parallelism": {}},
        {"hardware": GPUS, "parallelism": {"tensor": 2}},
        {"hardware": GPUS, "parallelism": {"data": 4}},
        {"hardware": GPUS, "parallelism": {"tensor": 1, "data": 4}, "engine": {"kvCacheDtype": "fp8_e4m3"}},
        {"hardware": {"accelerator": "cpu", "count": 1}, "parallelism": {"tensor": 1, "data": 1}},
        {"model": {"source": "hf://org/name", "revision": "refs/pr/1", "servedNames": ["a", "b/c"]}},
        {"model": {"source": "pvc://claim/folder/file.gguf"}},
        {"model": {"source": "pvc://claim"}},
        {"storage": {"cache": {"persistentVolumeClaim": {"claimName": "weights"}}}, "replicas": 0},
        {"hardware": {"accelerator": "cpu", "resources": {"limits": {"cpu": 4, "memory": "1.5Gi"}}}},
        {"engine": None, "parallelism": None},
    ],
)
def test_a_right_spec_is_read(document: Any, spec: Any) -> None:
    parse(document(**spec))


def test_all_faults_are_said_at_once(document: Any) -> None:
    messages = refusal(document(hardware=GPUS, parallelism={"tensor": 3}, rollout={"maxSurge": 0}))
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "manifest: it is empty"),
        ("a: b: c", "manifest: this is not YAML"),
        ("- 1", "manifest: it holds [1]"),
        ("kind: Pod\napiVersion: v1", "kind: this is v1 Pod, not stoker.dev/v1alpha1 InferenceEndpoint"),
        ("apiVersion: stoker.dev/v1alpha1\nkind: InferenceEndpoint\nmetadata: {name: a}", "spec: this field is requ"),
        ("apiVersion: stoker.dev/v1alpha1\nkind: InferenceEndpoint\nmetadata: {name: a}\nspec: 1", "spec: "),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, expected: str) -> None:
    with pytest.raises(Refused) as refused:
        read(text)
    assert str(refused.value).startswith(expected)


sizes = st.one_of(st.none(), st.integers(1, 64))


@given(count=st.integers(1, 64), tensor=sizes, data=sizes)
def test_what_is_left_out_follows_from_what_is_there(count: int, tensor: int | None, data: int | None) -> None:
    whole = [(t, d) for t, d in options(count) if (tensor is None or t == tensor) and (data is None or d == data)]
    resolved = resolve(count, tensor, data)
    if tensor is None and data is None:
        assert resolved == (count, 1)
    else:
        assert [resolved] == (whole or [None])
