"""Collection of the pods' metrics."""

from __future__ import annotations

from typing import Final, Literal

from stoker_operator.api.v1alpha1.base import Part

PodMonitorMode = Literal["Auto", "Enabled", "Disabled"]
DEFAULT_POD_MONITOR: Final[PodMonitorMode] = "Auto"


class Monitoring(Part):
    """Collection of the pods' metrics."""

    pod_monitor: PodMonitorMode | None = None
    """Whether the endpoint has a PodMonitor, by which the Prometheus operator scrapes the pods. Auto: if the cluster
    has the kind PodMonitor, unless the administrator disables it. Enabled: always; a missing kind is an error.
    Disabled: never. Absent: Auto."""

    @property
    def mode(self) -> PodMonitorMode:
        """`pod_monitor`, or its default."""
        return self.pod_monitor or DEFAULT_POD_MONITOR
