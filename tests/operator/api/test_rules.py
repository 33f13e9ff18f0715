"""Exact messages about invalid manifests, and the meaning of valid ones.

`rule_breakers.py` and `schema_faults.py` have many more invalid ones, which a real API server validates too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_operator.api.manifest import parse, read
from stoker_operator.api.v1alpha1.parallelism import Parallelism, options, resolve
from stoker_operator.api.violation import Refused

from .spec_changes import CHANGES, Change

GPUS = {"accelerator": "nvidia-h100-80gb", "count": 4}
CLAIM = {"persistentVolumeClaim": {"claimName": "weights"}}


def refusal(document: Any, before: Any = None) -> list[str]:
    with pytest.raises(Refused) as refused:
        parse(document, before)
    return [str(violation) for violation in refused.value.violations]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"hardware": {"accelerator": "nvidia-a10g", "count": 4}, "parallelism": {"tensor": 2, "data": 4}},
            "spec.parallelism: tensor (2) × data (4) needs 8 GPUs, 4 available; tensor × data must be 4 (4 × 1, "
            "2 × 2 or 1 × 4), or hardware.count 8",
        ),
        (
            {"hardware": {"accelerator": "nvidia-a10g", "count": 4}, "parallelism": {"tensor": 3, "data": 1}},
            "spec.parallelism: tensor (3) × data (1) uses 3 of 4 GPUs, 1 would be idle; tensor × data must be 4 "
            "(4 × 1, 2 × 2 or 1 × 4), or hardware.allowIdle true",
        ),
        (
            {"engine": {"kvCacheDtype": "int3"}},
            "spec.engine.kvCacheDtype: input should be 'auto', 'bfloat16', 'fp8', 'fp8_e4m3', 'fp8_e5m2', "
            "'fp8_per_token_head' or 'int8_per_token_head', not 'int3'",
        ),
        ({"replicas": -1}, "spec.replicas: input should be greater than or equal to 0, not -1"),
        ({"replicas": "3"}, "spec.replicas: input should be a valid integer, not '3'; remove the quotes"),
        ({"engine": [1]}, "spec.engine: input should be a mapping, not [1]"),
        ({"service": {"annotations": 3}}, "spec.service.annotations: input should be a mapping, not 3"),
        ({"hardware": {}}, "spec.hardware.accelerator: this field is required; set it"),
        (
            {"hardware": {"accelerator": "cpu", "resources": {"limits": {"memory": "4 GB"}}}},
            "spec.hardware.resources.limits.memory: should be an amount such as 500m, 4 or 16Gi, not '4 GB'",
        ),
        (
            {"rollout": {"maxSurge": "a quarter"}},
            "spec.rollout.maxSurge: should be a number up to 1000 or a percentage such as 25%, not 'a quarter'",
        ),
        ({"engine": {"env": [{"name": "A"}, {"name": "A"}]}}, "spec.engine.env: 'A' is listed twice"),
        (
            {"engine": {"kvcacheDtype": "auto"}},
            "spec.engine.kvcacheDtype: there is no such field; did you mean kvCacheDtype?",
        ),
        (
            {"engine": {"env": [{"name": "A", "valu": "1"}]}},
            "spec.engine.env[0].valu: there is no such field; did you mean value?",
        ),
        (
            {"auth": {"apiKeysSecretRef": {"name": "a", "optional": True}}},
            "spec.auth.apiKeysSecretRef.optional: there is no such field; the fields are name",
        ),
        ({"prefill": {}}, "spec.prefill: this field is reserved and not available yet; remove it"),
        ({"autoscaling": {}}, "spec.autoscaling: there is no such field; did you mean scaling?"),
        ({"qqqqqq": {}}, "spec.qqqqqq: there is no such field; the fields are replicas, hardware,"),
    ],
)
def test_a_wrong_spec_is_refused_with_field_and_remedy(document: Any, spec: Any, expected: str) -> None:
    (message,) = refusal(document(**spec))
    assert message.startswith(expected)


def test_remedy_for_a_cache_of_a_replica_of_several_pods_is_to_share_it(document: Any) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    messages = refusal(
        document(
            hardware={**GPUS, "nodes": 2},
            parallelism={"tensor": 4, "pipeline": 2},
            storage={"cache": {"volumeClaimTemplate": {"spec": claim}}},
            rollout={"maxSurge": 0, "maxUnavailable": 1},
        )
    )
    assert messages == [
        "spec.storage.cache: the claim is for one node, but there may be two pods; use access mode ReadWriteMany"
    ]


@pytest.mark.parametrize("name", ["1demo", "Demo", "de.mo", "demo-", "a" * 53])
def test_a_name_that_no_service_can_have_is_refused(document: Any, name: str) -> None:
    manifest = document()
    manifest["metadata"]["name"] = name
    assert refusal(manifest)[0].startswith(
        "metadata.name: this name is not valid for an InferenceEndpoint; use at most 52"
    )


def test_null_field_equals_an_absent_one(document: Any) -> None:
    assert parse(document(engine=None, parallelism=None, rollout={"maxSurge": None})) == parse(document(rollout={}))


def test_all_faults_are_reported_at_once(document: Any) -> None:
    messages = refusal(document(hardware=GPUS, parallelism={"tensor": 3}, rollout={"maxSurge": 0}))
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "manifest: the text is empty"),
        ("a: b: c", "manifest: the text is not YAML"),
        ("- 1", "manifest: the document is [1], not a mapping"),
        ("kind: Pod\napiVersion: v1", "kind: this is v1 Pod, not stoker.dev/v1alpha1 InferenceEndpoint; write an Inf"),
        (
            "kind: InferenceEndpoint\napiVersion: stoker.dev/v1",
            "kind: this is stoker.dev/v1 InferenceEndpoint, not stoker.dev/v1alpha1 InferenceEndpoint; "
            "set apiVersion: stoker.dev/v1alpha1",
        ),
        ("apiVersion: stoker.dev/v1alpha1\nkind: InferenceEndpoint\nmetadata: {name: a}", "spec: this field is requ"),
        ("apiVersion: stoker.dev/v1alpha1\nkind: InferenceEndpoint\nmetadata: {name: a}\nspec: 1", "spec: "),
    ],
)
def test_malformed_manifests_are_refused(text: str, expected: str) -> None:
    with pytest.raises(Refused) as refused:
        read(text)
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_cache_is_immutable_except_for_its_size(document: Any, change: Change) -> None:
    was, now = (document(storage=storage) for storage in (change.before, change.after))
    assert parse(now) and parse(was)
    if change.field:
        assert refusal(now, was) == [f"{change.field}: {change.sentence}"]
    else:
        assert parse(now, was)


def test_invalid_earlier_spec_can_be_fixed(document: Any) -> None:
    was = document(storage={"cache": CLAIM})
    now = copy.deepcopy(was)
    was["spec"]["fromAnotherVersion"] = 1
    was["spec"]["storage"] = {}
    parse(now, was)
    parse(now, {})
    parse(now, "nonsense")


def test_absent_fields_have_defaults(endpoint: Any) -> None:
    spec = endpoint().spec
    assert (spec.rollout.surge, spec.rollout.unavailable, spec.rollout.drain) == (1, 0, 30)
    assert (spec.rollout.startup_timeout, spec.rollout.follows_images) == (3600, False)
    assert (spec.engine.gpu_memory_utilization, spec.engine.runtime, spec.monitoring.mode) == (0.92, "stoker", "Auto")
    assert (spec.hardware.accelerators, spec.hardware.pods_per_replica, spec.hardware.gpus) == (1, 1, 1)
    assert spec.sizes == (1, 1, 1)
    explicit = endpoint(
        rollout={"maxSurge": 0, "maxUnavailable": "50%", "drainSeconds": 0, "imageUpdates": "Always"},
        engine={"gpuMemoryUtilizationPercent": 50},
    ).spec
    assert (explicit.rollout.surge, explicit.rollout.unavailable, explicit.rollout.drain) == (0, "50%", 0)
    assert explicit.rollout.follows_images
    assert explicit.engine.gpu_memory_utilization == 0.5


sizes = st.one_of(st.none(), st.integers(1, 64))


@given(gpus=st.integers(1, 128), tensor=sizes, data=sizes, pipeline=sizes)
def test_missing_sizes_are_derived_from_the_given_ones(
    gpus: int, tensor: int | None, data: int | None, pipeline: int | None
) -> None:
    found = resolve(gpus, Parallelism(tensor=tensor, data=data, pipeline=pipeline))
    assert found.pipeline == (pipeline or 1)
    assert found.tensor == tensor or tensor is None
    assert found.data == data or data is None
    if tensor is None and data is None:
        assert found.data == 1
    # If some split uses all GPUs and leaves a choice, it is found.
    if gpus % found.pipeline == 0:
        ways = [
            (t, d)
            for t, d in options(gpus // found.pipeline)
            if tensor in (None, t) and data in (None, d) and (tensor or data or d == 1)
        ]
        assert len(ways) <= 1
        assert (found.used == gpus) == bool(ways)
