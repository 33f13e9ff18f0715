"""Building blocks of Envoy's configuration: plain values, in the JSON form of its API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

Config = dict[str, Any]

TYPE: Final = "type.googleapis.com/envoy."

#: Names of the listener and of the picker's cluster, in the configuration and in metrics.
LISTENER: Final = "gateway"
PICKER: Final = "picker"


def resources(each: Iterable[Config]) -> Config:
    """Return the content of a file of resources that Envoy watches."""
    return {"resources": list(each)}


def socket_address(host: str, port: int) -> Config:
    """Return a TCP address."""
    return {"socket_address": {"address": host, "port_value": port}}


def pipe(path: object) -> Config:
    """Return the address of a Unix socket."""
    return {"pipe": {"path": str(path)}}


def seconds(seconds: float) -> str:
    """Return a duration in Envoy's format."""
    return f"{seconds:.3f}s"
