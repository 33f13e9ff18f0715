"""Trigger of a KEDA ScaledObject: endpoint, metric and target."""

from __future__ import annotations

import math
import re
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
#: Names of InferenceEndpoints.
_ENDPOINT_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
#: Characters of a target; `float` accepts others, too.
_NUMBER: Final = re.compile(r"[0-9.eE+-]+")
#: Limits of the target. KEDA writes it with three decimal places.
_MIN_TARGET: Final = 0.001
_MAX_TARGET: Final = 1e6
#: Maximum number of characters of a target, and of a value in an error message.
_MAX_SHOWN: Final = 100
#: Names of the metrics in the HorizontalPodAutoscaler. Names of external metrics must be in lower case.
_NAMES: Final[dict[Metric, str]] = {
    "pendingRequests": "pending-requests",
    "runningRequests": "running-requests",
    "kvCacheUsage": "kv-cache-usage",
}


class TriggerError(ValueError):
    """The metadata of a trigger is invalid."""


@dataclass(frozen=True)
class Trigger:
    """Endpoint, metric and target of a ScaledObject.

    Attributes:
        key: namespace and name of the InferenceEndpoint, which is in the ScaledObject's namespace.
        target: target value of the metric per replica.
    """

    key: EndpointKey
    metric: Metric
    target: float

    @property
    def metric_name(self) -> str:
        """Name of the metric in the HorizontalPodAutoscaler."""
        return _NAMES[self.metric]


def parse_trigger(name: str, namespace: str, metadata: Mapping[str, str]) -> Trigger:
    """Parse a trigger.

    Args:
        name, namespace: name and namespace of the ScaledObject.

    Raises:
        TriggerError: a key is unknown, or a value is missing or invalid.
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
        raise TriggerError(f"metadata.{_TARGET} is missing; write the metric's value for each replica, such as '8'")
    try:
        target = float(text) if len(text) <= _MAX_SHOWN and _NUMBER.fullmatch(text) else math.nan
    except ValueError:
        target = math.nan
    if not _MIN_TARGET <= target <= _MAX_TARGET:  # NaN fails too
        raise TriggerError(
            f"metadata.{_TARGET} is {_shown(text)}; write a number from {_MIN_TARGET} to {_MAX_TARGET:,.0f}"
        )
    endpoint = metadata.get(_ENDPOINT, name)
    if not endpoint or not namespace:
        raise TriggerError(f"metadata.{_ENDPOINT} is empty; write the InferenceEndpoint's name")
    if not _ENDPOINT_NAME.fullmatch(endpoint):
        raise TriggerError(f"{_shown(endpoint)} is not an InferenceEndpoint's name; write one as metadata.{_ENDPOINT}")
    return Trigger((namespace, endpoint), metric, target)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…")
