"""Who reaches the pods."""

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
#: Host bits that are set would be ignored by some, and are refused by newer API servers.
_IS_NETWORK: Final = "isCIDR({0}) && cidr({0}) == cidr({0}).masked()"


def _network(cidr: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The network that `cidr` names; None where the API server takes it for none."""
    try:
        network = ipaddress.ip_network(cidr)
    except ValueError:
        return None
    address = network.network_address
    return None if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped else network


def _lies_within(inner: str, outer: str) -> bool:
    """Whether `inner` is a part of `outer` and not all of it; True where one of them is no network."""
    a, b = _network(inner), _network(outer)
    if a is None or b is None:
        return True
    return a.version == b.version and a.prefixlen > b.prefixlen and a.network_address in b


class IPBlock(Part):
    """Addresses, as in networking/v1. Those of clients outside the cluster arrive only where the Service keeps them."""

    cidr: Cidr
    """The addresses, such as 10.0.0.0/8."""
    except_: Annotated[list[Cidr], Field(max_length=32)] | None = Field(default=None, alias="except")
    """Addresses among them that are not let in."""

    RULES: ClassVar = (
        Rule(
            field="cidr",
            holds=lambda it: _network(it.cidr) is not None,
            cel=_IS_NETWORK.format("self.cidr"),
            message="this is no network",
            remedy="use one such as 10.0.0.0/8",
        ),
        Rule(
            field="except",
            holds=lambda it: all(_network(each) is not None for each in it.except_ or ()),
            cel=f"!has(self.except) || self.except.all(inner, {_IS_NETWORK.format('inner')})",
            message="one of these is no network",
            remedy="use networks such as 10.1.0.0/16",
        ),
        Rule(
            field="except",
            holds=lambda it: all(_lies_within(each, it.cidr) for each in it.except_ or ()),
            cel="!has(self.except) || !isCIDR(self.cidr) || self.except.all(inner, !isCIDR(inner) || "
            "(cidr(self.cidr).containsIP(cidr(inner).ip()) "
            "&& cidr(inner).prefixLength() > cidr(self.cidr).prefixLength()))",
            message="one of these networks is not a part of cidr",
            remedy="use networks that cidr contains",
        ),
    )


class NetworkPolicyPeer(Part):
    """Who may send requests, as in networking/v1: pods, by their labels and those of their namespace, or addresses."""

    pod_selector: LabelSelector | None = None
    """Pods; of the endpoint's namespace where namespaceSelector is absent. Absent: all of them."""
    namespace_selector: LabelSelector | None = None
    """Namespaces of these pods; {} are all. The label kubernetes.io/metadata.name is a namespace's name."""
    ip_block: IPBlock | None = None
    """Addresses, such as those of clients outside the cluster."""

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
    """Who reaches the port that serves the API. Other ports of the pods are closed, those of sidecars too."""

    mode: NetworkPolicyMode | None = None
    """Namespace: pods of the endpoint's namespace, the operator, and whom the administrator names for all endpoints,
    such as Prometheus and a gateway. Open: everyone who reaches the pods' network. None: there is no NetworkPolicy of
    the operator's, and those of the namespace alone decide. Absent: Namespace."""
    from_: Annotated[list[NetworkPolicyPeer], Field(min_length=1, max_length=32)] | None = Field(
        default=None, alias="from"
    )
    """Who else may come, with mode Namespace."""

    RULES: ClassVar = (
        Rule(
            field="from",
            holds=lambda it: it.from_ is None or it.resolved == "Namespace",
            cel="!has(self.from) || !has(self.mode) || self.mode == 'Namespace'",
            message="clients are listed for mode Namespace only: Open admits every client, None makes no policy",
            remedy="remove from, or set mode to Namespace",
        ),
    )

    @property
    def resolved(self) -> NetworkPolicyMode:
        """`mode`, or what its absence means."""
        return self.mode or DEFAULT_MODE

    @property
    def lets_outsiders_in(self) -> bool:
        """Whether the endpoint's author admits clients from outside its namespace."""
        return self.resolved != "Namespace" or self.from_ is not None
