"""What all parts of Envoy's configuration are made of: plain values, as its API has them in JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

Config = dict[str, Any]

TYPE: Final = "type.googleapis.com/envoy."

#: As metrics call them.
LISTENER: Final = "gateway"
PICKER: Final = "picker"


def resources(each: Iterable[Config]) -> Config:
    """A file of resources that Envoy watches."""
    return {"resources": list(each)}


def socket_address(host: str, port: int) -> Config:
    """Where TCP connections go to, or come from."""
    return {"socket_address": {"address": host, "port_value": port}}


def pipe(path: object) -> Config:
    """A socket in the file system."""
    return {"pipe": {"path": str(path)}}


def seconds(seconds: float) -> str:
    """A duration."""
    return f"{seconds:.3f}s"
