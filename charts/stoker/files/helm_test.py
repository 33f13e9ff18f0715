"""The check that `helm test` runs in the operator's image: python helm_test.py NAMESPACE accepts|refuses

The last argument is the expected result for an endpoint whose hardware is not in the catalogue.
"""

import sys
import time

from kubernetes import client, config

SECONDS = 30  # time limit for the API server to start to call the webhook


def verdict(namespace: str, accelerator: str) -> str:
    """Return the API server's error of a dry run with an endpoint; empty: it is accepted."""
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
    """Return what is wrong; empty: nothing."""
    config.load_config()  # type: ignore[no-untyped-call]
    if refusal := verdict(namespace, "cpu"):
        return f"a valid endpoint is not accepted: {refusal}"
    deadline = time.monotonic() + SECONDS
    while (answer := verdict(namespace, "in-no-catalogue")) == "" and expected == "refuses":
        if time.monotonic() > deadline:
            return "the webhook is not called: an endpoint whose hardware is not in the catalogue is accepted"
        time.sleep(1)
    if expected == "refuses" and "spec.hardware.accelerator" not in answer:
        return f"an invalid endpoint is refused for another reason: {answer}"
    print("the API server has InferenceEndpoint, and", expected, "one whose hardware is not in the catalogue")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]) or 0)
