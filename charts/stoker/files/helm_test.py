"""What `helm test` runs in the operator's image: python helm_test.py NAMESPACE accepts|refuses

The last word says what is to become of an endpoint for hardware that is in no catalogue.
"""

import sys
import time

from kubernetes import client, config

SECONDS = 30  # for the API server to take up the webhook


def verdict(namespace: str, accelerator: str) -> str:
    """What the API server says of an endpoint that is not stored; empty where it is accepted."""
    endpoint = {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceEndpoint",
        "metadata": {"generateName": "helm-test-"},
        "spec": {"model": {"source": "demo://gemma-3-270m"}, "hardware": {"accelerator": accelerator}},
    }
    where = ("stoker.dev", "v1alpha1", namespace, "inferenceendpoints")
    try:
        client.CustomObjectsApi().create_namespaced_custom_object(*where, endpoint, dry_run="All")
    except client.ApiException as error:
        return f"{error.status} {error.body}"
    return ""


def main(namespace: str, expected: str) -> str:
    """What is wrong; empty where nothing is."""
    config.load_config()  # type: ignore[no-untyped-call]
    if refusal := verdict(namespace, "cpu"):
        return f"a right endpoint is not accepted: {refusal}"
    deadline = time.monotonic() + SECONDS
    while (answer := verdict(namespace, "in-no-catalogue")) == "" and expected == "refuses":
        if time.monotonic() > deadline:
            return "the webhook is not called: an endpoint for hardware that is in no catalogue is accepted"
        time.sleep(1)
    if expected == "refuses" and "spec.hardware.accelerator" not in answer:
        return f"a wrong endpoint is refused for another reason: {answer}"
    print("the API server has InferenceEndpoint, and", expected, "one for hardware that is in no catalogue")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]) or 0)
