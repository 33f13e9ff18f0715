"""Prometheus' standard metrics of a process, for the supervisor and its front ends together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_CPU = "process_cpu_seconds_total"
#: Metrics whose lowest value is shown; of others, the sum.
_LOWEST = frozenset({"process_start_time_seconds", "process_max_fds"})


class ProcessesCollector(Collector):
    """Sums up the metrics of several processes. CPU time of processes that have ended stays counted, as last seen.

    Args:
        pids: returns the ids of the running processes; called at each scrape.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._cpu: dict[int, float] = {}  # by process id
        self._earlier_cpu = 0.0  # of ended processes whose id has been used again
        self._lock = threading.Lock()  # scrapes may overlap

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        with self._lock:
            return list(self._collect())

    def _collect(self) -> Iterable[Metric]:
        values: dict[str, list[float]] = {}
        helps: dict[str, str] = {}
        for pid in self._pids():
            for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                for sample in metric.samples:
                    values.setdefault(sample.name, []).append(sample.value)
                    helps[sample.name] = metric.documentation
                    if sample.name == _CPU:
                        before = self._cpu.get(pid, 0.0)
                        self._earlier_cpu += before if sample.value < before else 0.0
                        self._cpu[pid] = sample.value
        for name, all_values in values.items():
            if name == _CPU:
                yield CounterMetricFamily(name, helps[name], self._earlier_cpu + sum(self._cpu.values()))
            else:
                yield GaugeMetricFamily(name, helps[name], min(all_values) if name in _LOWEST else sum(all_values))
