"""Messages between replicas, as JSON.

message  the sender's identity, an increasing number, usage statements, and admission requests
reply    the replying replica's identity, and verdicts on the requests
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import orjson

from stoker_gateway.keys.key import Limits
from stoker_gateway.limits.peer_reports import Statement
from stoker_gateway.limits.ratelimit_headers import Allowance, Denial, RateLimitStatus

LimitVerdict = RateLimitStatus | Denial


class MessageError(Exception):
    """A message or reply is invalid; the other replica may run another version."""


@dataclass(frozen=True, slots=True)
class LimitRequest:
    """A replica's request to admit a client's request.

    Attributes:
        limits: limits of the key, as known by the sender.
        tokens: number of tokens to reserve.
    """

    key_id: str
    limits: Limits
    tokens: int


@dataclass(frozen=True, slots=True)
class Message:
    """A message from one replica to another.

    Attributes:
        sender: identity of the sender.
        number: increases with each message of a sender.
        uses: usage of the sender's clients, by key id.
    """

    sender: str
    number: int
    uses: dict[str, Statement] = field(default_factory=dict)
    requests: tuple[LimitRequest, ...] = ()

    def encode(self) -> bytes:
        """Encode as JSON. The field `requests` is called ``asks`` there, for replicas of earlier versions."""
        fields = {"sender": self.sender, "number": self.number, "uses": self.uses, "asks": self.requests}
        return orjson.dumps(fields)

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Decode from JSON.

        Raises:
            MessageError: the data is not a message.
        """
        try:
            fields = orjson.loads(data)
            requests = tuple(
                LimitRequest(each["key_id"], Limits(**each["limits"]), each["tokens"]) for each in fields["asks"]
            )
            return cls(fields["sender"], fields["number"], fields["uses"], requests)
        except (ValueError, TypeError, KeyError) as error:
            raise MessageError(f"invalid message from a replica: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a message.

    Attributes:
        sender: identity of the replying replica.
        verdicts: in the order of the message's `requests`; empty if the message is outdated.
    """

    sender: str
    verdicts: tuple[LimitVerdict, ...] = ()

    def encode(self) -> bytes:
        """Encode as JSON."""
        return orjson.dumps({"sender": self.sender, "verdicts": [dataclasses.asdict(each) for each in self.verdicts]})

    @classmethod
    def decode(cls, data: bytes) -> Reply:
        """Decode from JSON.

        Raises:
            MessageError: the data is not a reply.
        """
        try:
            fields = orjson.loads(data)
            return cls(fields["sender"], tuple(_verdict(each) for each in fields["verdicts"]))
        except (ValueError, TypeError, KeyError) as error:
            raise MessageError(f"invalid reply from a replica: {error!r}") from None


def _verdict(fields: dict[str, Any]) -> LimitVerdict:
    if "what" not in fields:
        return _standing(fields)
    return Denial(**fields | {"standing": _standing(fields["standing"])})


def _standing(fields: dict[str, Any]) -> RateLimitStatus:
    return RateLimitStatus(**{name: None if each is None else Allowance(**each) for name, each in fields.items()})
