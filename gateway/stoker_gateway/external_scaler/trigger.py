"""The trigger of a KEDA ScaledObject: which endpoint it scales, and by which metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

from stoker_common.scaling.signals import EndpointKey, Metric

_ENDPOINT: Final = "inferenceEndpoint"
_METRIC: Final = "metric"
_TARGET: Final = "target"
#: Keys of a trigger's metadata that KEDA itself reads and passes on.
_OF_KEDA: Final = frozenset({"scalerAddress", "enableTLS", "unsafeSsl", "caCert", "tlsClientCert", "tlsClientKey"})
_DEFAULT_METRIC: Final[Metric] = "pendingRequests"
_MAX_TARGET: Final = 1e6
#: Characters of a value that an error repeats.
_MAX_SHOWN: Final = 100
#: What the HorizontalPodAutoscaler calls the metrics. Names of external metrics are in lower case.
_NAMES: Final[dict[Metric, str]] = {
    "pendingRequests": "pending-requests",
    "runningRequests": "running-requests",
    "kvCacheUsage": "kv-cache-usage",
}


class TriggerError(ValueError):
    """A trigger's metadata is wrong."""


@dataclass(frozen=True)
class Trigger:
    """What a ScaledObject scales by.

    Attributes:
        key: the InferenceEndpoint's, which is in the ScaledObject's namespace.
        target: how much of the metric there should be for each replica.
    """

    key: EndpointKey
    metric: Metric
    target: float

    @property
    def metric_name(self) -> str:
        """The metric, as the HorizontalPodAutoscaler calls it."""
        return _NAMES[self.metric]


def parse_trigger(name: str, namespace: str, metadata: Mapping[str, str]) -> Trigger:
    """Parse a trigger.

    Args:
        name, namespace: the ScaledObject's.
        metadata: the trigger's.

    Raises:
        TriggerError: a key is unknown, or a value is missing or wrong.
    """
    unknown = sorted(set(metadata) - _OF_KEDA - {_ENDPOINT, _METRIC, _TARGET})
    if unknown:
        raise TriggerError(
            f"the trigger's metadata has the unknown key {_shown(unknown[0])}; the keys are {_ENDPOINT}, {_METRIC} and "
            f"{_TARGET}"
        )
    metric = metadata.get(_METRIC, _DEFAULT_METRIC)
    if metric not in _NAMES:
        raise TriggerError(f"metadata.{_METRIC} is {_shown(metric)}; use one of {', '.join(get_args(Metric))}")
    text = metadata.get(_TARGET)
    if text is None:
        raise TriggerError(f"metadata.{_TARGET} is missing: the amount of the metric for each replica, such as '8'")
    try:
        target = float(text) if len(text) <= _MAX_SHOWN else math.nan
    except ValueError:
        target = math.nan
    if not 0 < target <= _MAX_TARGET:  # NaN fails too
        raise TriggerError(f"metadata.{_TARGET} is {_shown(text)}; write a number above 0, at most {_MAX_TARGET:,.0f}")
    endpoint = metadata.get(_ENDPOINT, name)
    if not endpoint or not namespace:
        raise TriggerError(f"metadata.{_ENDPOINT} is empty; write the InferenceEndpoint's name")
    return Trigger((namespace, endpoint), metric, target)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…")
