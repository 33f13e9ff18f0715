"""The field ``networkPolicy``: which clients may send requests to the pods."""

from __future__ import annotations

import ipaddress
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part
from stoker_operator.api.v1alpha1.label_selector import LabelSelector

NetworkPolicyMode = Literal["Namespace", "Open", "None"]
DEFAULT_MODE: Final[NetworkPolicyMode] = "Namespace"

Cidr = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^([0-9.]+|[0-9a-fA-F:]+)/(0|[1-9][0-9]{0,2})$")]
#: Networks with host bits are refused: some network plugins ignore these bits, and newer API servers refuse them.
_IS_NETWORK: Final = "isCIDR({0}) && cidr({0}) == cidr({0}).masked()"


def _network(cidr: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the network that `cidr` describes, or None if the API server does not accept it."""
    try:
        network = ipaddress.ip_network(cidr)
    except ValueError:
        return None
    address = network.network_address
    return None if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped else network


def _lies_within(inner: str, outer: str) -> bool:
    """Whether `inner` is a proper subnet of `outer`; True if one of them is not a network."""
    a, b = _network(inner), _network(outer)
    if a is None or b is None:
        return True
    return a.version == b.version and a.prefixlen > b.prefixlen and a.network_address in b


class IPBlock(Part):
    """Range of addresses, as in networking/v1."""

    cidr: Cidr
    """The range, such as 10.0.0.0/8."""
    except_: Annotated[list[Cidr], Field(max_length=32)] | None = Field(default=None, alias="except")
    """Ranges inside cidr that are excluded."""

    RULES: ClassVar = (
        Rule(
            field="cidr",
            holds=lambda it: _network(it.cidr) is not None,
            cel=_IS_NETWORK.format("self.cidr"),
            message="the value is not a network",
            remedy="use one such as 10.0.0.0/8",
        ),
        Rule(
            field="except",
            holds=lambda it: all(_network(each) is not None for each in it.except_ or ()),
            cel=f"!has(self.except) || self.except.all(inner, {_IS_NETWORK.format('inner')})",
            message="an excluded range is not a network",
            remedy="use networks such as 10.1.0.0/16",
        ),
        Rule(
            field="except",
            holds=lambda it: all(_lies_within(each, it.cidr) for each in it.except_ or ()),
            cel="!has(self.except) || !isCIDR(self.cidr) || self.except.all(inner, !isCIDR(inner) || "
            "(cidr(self.cidr).containsIP(cidr(inner).ip()) "
            "&& cidr(inner).prefixLength() > cidr(self.cidr).prefixLength()))",
            message="an excluded range is not inside cidr",
            remedy="use networks that cidr contains",
        ),
    )


class NetworkPolicyPeer(Part):
    """Clients that may send requests, as in networking/v1: pods, by labels and namespace, or addresses."""

    pod_selector: LabelSelector | None = None
    """Selector of pods, in the endpoint's namespace if namespaceSelector is absent. Absent: all pods of the selected
    namespaces."""
    namespace_selector: LabelSelector | None = None
    """Selector of the pods' namespaces; {} selects all. The label kubernetes.io/metadata.name holds a namespace's
    name."""
    ip_block: IPBlock | None = None
    """Addresses, such as those of clients outside the cluster if the Service preserves them."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: (
                (it.ip_block is not None) != (it.pod_selector is not None or it.namespace_selector is not None)
            ),
            cel="has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
            message="a peer is either pods or addresses",
            remedy="set podSelector, namespaceSelector or both, or set ipBlock alone",
        ),
    )


class NetworkPolicy(Part):
    """Access to the pods' port for the API."""

    mode: NetworkPolicyMode | None = None
    """Namespace: access for pods in the endpoint's namespace, the gateway that serves the endpoint, and clients that
    the administrator admits to all endpoints, such as the operator and Prometheus. Open: access for every client that
    reaches the pods' network. None: the operator creates no NetworkPolicy. Absent: Namespace."""
    from_: Annotated[list[NetworkPolicyPeer], Field(min_length=1, max_length=32)] | None = Field(
        default=None, alias="from"
    )
    """Additional clients, only with mode Namespace."""

    RULES: ClassVar = (
        Rule(
            field="from",
            holds=lambda it: it.from_ is None or it.resolved == "Namespace",
            cel="!has(self.from) || !has(self.mode) || self.mode == 'Namespace'",
            message="from requires mode Namespace: Open admits every client, None creates no policy",
            remedy="remove from, or set mode to Namespace",
        ),
    )

    @property
    def resolved(self) -> NetworkPolicyMode:
        """`mode`, or its default."""
        return self.mode or DEFAULT_MODE

    @property
    def lets_outsiders_in(self) -> bool:
        """Whether the spec may admit clients from outside the namespace."""
        return self.resolved != "Namespace" or self.from_ is not None
