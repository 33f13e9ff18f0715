"""How metrics are collected."""

from __future__ import annotations

from typing import Final, Literal

from stoker_operator.api.v1alpha1.base import Part

PodMonitorMode = Literal["Auto", "Enabled", "Disabled"]
DEFAULT_POD_MONITOR: Final[PodMonitorMode] = "Auto"


class Monitoring(Part):
    """How metrics are collected."""

    pod_monitor: PodMonitorMode | None = None
    """Whether the Prometheus operator scrapes the pods, by a PodMonitor. Auto: where the cluster has the kind
    PodMonitor, unless the administrator has endpoints scraped otherwise. Enabled: it must. Disabled: never. Absent:
    Auto."""

    @property
    def mode(self) -> PodMonitorMode:
        """`pod_monitor`, or what its absence means."""
        return self.pod_monitor or DEFAULT_POD_MONITOR
