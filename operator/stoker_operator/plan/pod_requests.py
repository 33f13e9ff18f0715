"""The devices that a pod holds, by Kubernetes' rule (KEP 753, "effective request").

containers       run at the same time as the sidecars, which are init containers with restartPolicy Always
init containers  run one after another, at the same time as the sidecars that started before
a pod holds      its peak request, plus its overhead
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pod_requests(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of devices that a pod of this spec holds, by resource."""
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        at_once = _sum(sidecars, _of(container))
        peak = {name: max(peak.get(name, 0), at_once.get(name, 0)) for name in peak.keys() | at_once.keys()}
        if container.get("restartPolicy") == "Always":
            sidecars = at_once
    running = sidecars
    for container in spec.get("containers") or ():
        running = _sum(running, _of(container))
    largest = {name: max(peak.get(name, 0), running.get(name, 0)) for name in peak.keys() | running.keys()}
    held = _sum(largest, devices(spec.get("overhead") or {}))
    return {name: amount for name, amount in held.items() if amount}


def devices(amounts: Mapping[str, Any]) -> dict[str, int]:
    """Return the amounts of devices, which are extended resources: names with a domain, and integer amounts."""
    return {name: int(amount) for name, amount in amounts.items() if "/" in name and str(amount).isdigit()}


def _of(container: Mapping[str, Any]) -> dict[str, int]:
    resources = container.get("resources") or {}
    return devices({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}
