"""What the API server itself refuses, by schema and CEL, and that `stoker up` and `stoker plan` judge the same."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client

from stoker_operator.api.manifest import parse
from stoker_operator.api.violation import Refused

GPUS = {"accelerator": "nvidia-h100-80gb", "count": 4}


def refusal(kube: Any, document: Any) -> str:
    """What the API server says of a manifest; empty where it takes it."""
    try:
        kube.create("default", document, dry_run="All", field_validation="Strict")
    except client.ApiException as error:
        message: str = json.loads(error.body)["message"]
        return message
    return ""


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"hardware": GPUS, "parallelism": {"tensor": 2, "data": 3}},
            "spec.parallelism: Invalid value: tensor (2) × data (3) needs 6 GPUs but hardware.count is 4; use "
            "tensor 4, data 1 or tensor 2, data 2 or tensor 1, data 4, or set hardware.count to 6",
        ),
        (
            {"hardware": GPUS, "parallelism": {"tensor": 3}},
            "spec.parallelism: Invalid value: tensor (3) does not divide",
        ),
        (
            {"engine": {"kvCacheDtype": "int3"}},
            'spec.engine.kvCacheDtype: Unsupported value: "int3": supported values: "auto", "fp8", "fp8_e5m2", ',
        ),
        (
            {"engine": {"kvCacheDtype": "fp8"}},
            "spec.engine.kvCacheDtype: Invalid value: the engine has no fp8 key-value cache on accelerator cpu; use",
        ),
        (
            {"hardware": {"accelerator": "cpu", "count": 2}},
            "spec.hardware.count: Invalid value: accelerator cpu is not",
        ),
        (
            {"model": {"source": "s3://b"}},
            "spec.model.source: Invalid value: this is no model source; use hf://ORG/NAME",
        ),
        ({"engine": {"dtype": "int8"}}, 'spec.engine.dtype: Unsupported value: "int8": supported values: "auto", "flo'),
        ({"modle": {}}, 'unknown field "spec.modle"'),
        ({"rollout": {"maxSurge": 0}}, "spec.rollout: Invalid value: maxSurge 0 and maxUnavailable 0 leave no way"),
        ({"replicas": -1}, "spec.replicas: Invalid value: -1: spec.replicas in body should be greater than or equal"),
    ],
)
def test_a_wrong_spec_is_refused(kube: Any, document: Any, spec: Any, expected: str) -> None:
    assert expected in refusal(kube, document(**spec))


@pytest.mark.parametrize("name", ["1demo", "de.mo", "a" * 53])
def test_a_wrong_name_is_refused(kube: Any, document: Any, name: str) -> None:
    assert "metadata.name: Invalid value: this name cannot be that of a Service" in refusal(kube, document(name))


def test_what_is_left_out_is_not_written_into_the_object(kube: Any, document: Any, ns: str) -> None:
    created = kube.create(ns, document(hardware=GPUS, parallelism={"tensor": 2}, engine=None, service=None))
    assert created["spec"] == {
        "model": {"source": "demo://gemma-3-270m"},
        "replicas": 1,
        "hardware": GPUS,
        "parallelism": {"tensor": 2},
    }


# What the two judges are given: mostly right, and wrong here and there in every way a rule is about.
words = st.sampled_from(["a", "b", "A/b", "", "-x"])
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
                "chatTemplate": st.fixed_dictionaries({}, optional={"value": words, "configMapKeyRef": refs}),
            },
        ),
        "hardware": st.fixed_dictionaries(
            {"accelerator": st.sampled_from(["cpu", "nvidia-l4", "nvidia-h100-80gb", "Bad"])},
            optional={
                "count": st.sampled_from([0, 1, 2, 3, 4, 8, 60, 64, 65]),
                "resources": st.fixed_dictionaries(
                    {}, optional={"limits": st.dictionaries(st.just("cpu"), st.sampled_from([1, "500m", "x", "1 Gi"]))}
                ),
            },
        ),
    },
    optional={
        "replicas": st.sampled_from([0, 1, 3, -1]),
        "parallelism": st.fixed_dictionaries(
            {},
            optional={"tensor": st.sampled_from([1, 2, 3, 4, 8, 64]), "data": st.sampled_from([1, 2, 3, 4, 8, 64])},
        ),
        "engine": st.fixed_dictionaries(
            {},
            optional={
                "kvCacheDtype": st.sampled_from(["auto", "fp8", "fp8_e4m3", "int3"]),
                "maxNumSeqs": st.sampled_from([0, 1, 2**31 - 1, 2**31]),
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
                    unique_by=lambda variable: variable["name"],
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
                    },
                )
            },
        ),
        "rollout": st.fixed_dictionaries(
            {}, optional={"maxSurge": st.integers(-1, 2), "maxUnavailable": st.integers(-1, 2)}
        ),
    },
)  # fmt: skip


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=specs)
def test_python_and_the_api_server_judge_alike(kube: Any, document: Any, spec: Any) -> None:
    manifest = document(**spec)
    told = refusal(kube, copy.deepcopy(manifest))
    try:
        parse(manifest)
        ours: tuple[Any, ...] = ()
    except Refused as refused:
        ours = refused.violations
    assert bool(told) == bool(ours), f"the API server: {told or 'fine'}; we: {ours or 'fine'}"
    for violation in ours:
        assert violation.field in told
        # A rule speaks in the same words on both sides; what the schema says itself is in the API server's own words.
        if violation.remedy and "this field is required" not in violation.message:
            assert violation.sentence in told
