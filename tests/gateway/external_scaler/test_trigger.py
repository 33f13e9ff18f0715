"""The metadata of a ScaledObject's trigger."""

from __future__ import annotations

import pytest

from stoker_gateway.external_scaler.trigger import TriggerError, parse_trigger


def test_the_endpoint_is_the_scaled_objects_name_unless_given() -> None:
    of_keda = {"scalerAddress": "gateway:8083", "enableTLS": "false"}
    trigger = parse_trigger("demo", "ns", {"target": "8", **of_keda})
    assert (trigger.key, trigger.metric, trigger.target) == (("ns", "demo"), "pendingRequests", 8.0)
    trigger = parse_trigger("demo", "ns", {"inferenceEndpoint": "b", "metric": "kvCacheUsage", "target": "0.7"})
    assert (trigger.key, trigger.metric_name, trigger.target) == (("ns", "b"), "kv-cache-usage", 0.7)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "target is missing"),
        ({"target": "0"}, "'0'; write a number from 0.001"),
        ({"target": "-1"}, "number from 0.001"),
        ({"target": "1e-9"}, "number from 0.001"),
        ({"target": "nan"}, "number from 0.001"),
        ({"target": "inf"}, "number from 0.001"),
        ({"target": "1e9"}, "number from 0.001"),
        ({"target": "many"}, "number from 0.001"),
        ({"target": " 8 "}, "' 8 '; write a number from 0.001"),
        ({"target": "1_0"}, "number from 0.001"),
        ({"target": "٨"}, "number from 0.001"),
        ({"target": "1" * 5000}, "number from 0.001"),
        ({"target": "8", "metric": "cpu"}, "'cpu'; use one of pendingRequests, runningRequests, kvCacheUsage"),
        ({"target": "8", "metric": "x" * 5000}, "use one of"),
        ({"target": "8", "inferenceEndpoint": ""}, "inferenceEndpoint is empty"),
        ({"target": "8", "inferenceEndpoint": " b"}, "' b' is not an InferenceEndpoint's name"),
        ({"target": "8", "inferenceEndpoint": "ns/b"}, "'ns/b' is not an InferenceEndpoint's name"),
        ({"target": "8", "inferenceEndpoint": "b" * 5000}, "is not an InferenceEndpoint's name"),
        ({"target": "8", "targetValue": "3"}, "unknown key 'targetValue'"),
        ({"target": "8", "y" * 5000: "3"}, "unknown key"),
    ],
)
def test_wrong_metadata_is_refused_by_its_key(metadata: dict[str, str], words: str) -> None:
    with pytest.raises(TriggerError) as refused:
        parse_trigger("demo", "ns", metadata)
    assert words in str(refused.value) and len(str(refused.value)) < 400
