"""What a running engine says of itself that was only predicted before: one request to one pod after a roll-out, and
some more where that is not answered.

The number of KV-cache blocks is in vLLM's metric ``vllm:cache_config_info``, which Stoker's engine has as well. That
it cannot be asked, because a policy keeps the operator from reaching pods, say, costs nothing but the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import urllib3
from prometheus_client.parser import text_string_to_metric_families

_METRIC: Final = "vllm:cache_config_info"
_BLOCKS: Final = "num_gpu_blocks"
_TIMEOUT: Final = urllib3.Timeout(total=2)


def metrics_url(container: Mapping[str, Any], address: str) -> str:
    """Where the engine in this container, of a pod at `address`, serves its metrics: beside what its probe asks."""
    probe = container.get("readinessProbe", {}).get("httpGet", {})
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "http")
    host = f"[{address}]" if ":" in address else address
    return f"{probe.get('scheme', 'HTTP').lower()}://{host}:{port}/metrics"


def kv_blocks(url: str) -> int | None:
    """The blocks of the KV cache of the engine whose metrics are at `url`; None where it does not tell."""
    # The certificate of a pod is not made for its address, and the number is no secret.
    with urllib3.PoolManager(cert_reqs="CERT_NONE", retries=False, timeout=_TIMEOUT) as http:
        try:
            text = http.request("GET", url).data.decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == _METRIC and sample.labels.get(_BLOCKS, "").isdigit():
                        return int(sample.labels[_BLOCKS])
        except (urllib3.exceptions.HTTPError, ValueError):
            return None
    return None
