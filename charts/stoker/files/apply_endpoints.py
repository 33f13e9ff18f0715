"""What the chart's Job runs in the operator's image: python apply_endpoints.py ENDPOINTS

ENDPOINTS is a JSON list of manifests. They are applied under the field manager helm.
"""

import json
import sys
import time
from typing import Any

from kubernetes import client, config

SECONDS = 60  # for the definition, installed a moment ago, to be served


def main(text: str) -> str:
    """What is wrong; empty where nothing is."""
    config.load_config()  # type: ignore[no-untyped-call]
    deadline = time.monotonic() + SECONDS
    for manifest in json.loads(text):
        while refusal := apply(manifest):
            if not passes(refusal) or time.monotonic() > deadline:
                return f"{manifest['metadata']['name']}: {refusal.status} {refusal.body}"
            time.sleep(1)
        print("applied", manifest["metadata"]["name"])
    return ""


def apply(manifest: dict[str, Any]) -> client.ApiException | None:
    """Server-side apply; what the API server says against it."""
    metadata = manifest["metadata"]
    try:
        client.CustomObjectsApi().patch_namespaced_custom_object(
            *("stoker.dev", "v1alpha1", metadata["namespace"], "inferenceendpoints", metadata["name"]),
            manifest,
            field_manager="helm",
            force=True,
            field_validation="Strict",
            _content_type="application/apply-patch+yaml",
        )
    except client.ApiException as error:
        return error
    return None


def passes(refusal: client.ApiException) -> bool:
    """Whether the error may pass by itself: the definition is not served yet, or the webhook is not called yet. A
    field that the definition lacks is another error of the API server."""
    return refusal.status in (404, 500, 503) and "failed to create typed patch object" not in str(refusal.body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) or 0)
