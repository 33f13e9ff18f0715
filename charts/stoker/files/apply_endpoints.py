"""The script of the chart's Job, run in the operator's image: python apply_endpoints.py ENDPOINTS

ENDPOINTS is a JSON list of manifests. They are applied under the field manager helm.
"""

import json
import sys
import time
from typing import Any

from kubernetes import client, config

SECONDS = 60  # time limit for the API server to serve a definition that was just installed


def main(text: str) -> str:
    """Return what is wrong; empty: nothing."""
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
    """Apply a manifest on the server, and return the API server's error, or None if there is none."""
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
    """Return whether the error may pass by itself: the definition is not served, or the webhook not called yet.

    An unknown field is also reported as an internal error, and does not pass.
    """
    return refusal.status in (404, 500, 503) and "failed to create typed patch object" not in str(refusal.body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) or 0)
