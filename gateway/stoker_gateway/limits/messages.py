"""What replicas say to each other, as JSON.

to an owner:  who says it, a number that grows, statements of use, and asks
from it:      who it is, and for each ask a verdict
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
    """That is not what replicas say: another version of them, perhaps."""


@dataclass(frozen=True, slots=True)
class LimitRequest:
    """Whether a request may begin.

    Attributes:
        limits: of its key, as the replica that asks knows them.
        tokens: that it reserves.
    """

    key_id: str
    limits: Limits
    tokens: int


@dataclass(frozen=True, slots=True)
class Message:
    """What a replica says to another.

    Attributes:
        sender: its identity.
        number: grows with each message of a sender.
        uses: what its clients use, by key.
    """

    sender: str
    number: int
    uses: dict[str, Statement] = field(default_factory=dict)
    asks: tuple[LimitRequest, ...] = ()

    def encode(self) -> bytes:
        """As it is sent."""
        return orjson.dumps(self)

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """As it was sent.

        Raises:
            MessageError: it is none.
        """
        try:
            fields = orjson.loads(data)
            asks = (LimitRequest(ask["key_id"], Limits(**ask["limits"]), ask["tokens"]) for ask in fields["asks"])
            return cls(fields["sender"], fields["number"], fields["uses"], tuple(asks))
        except (ValueError, TypeError, KeyError) as error:
            raise MessageError(f"invalid message from a replica: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Reply:
    """What is replied.

    Attributes:
        sender: the identity of who replies.
        verdicts: in the order of the asks.
    """

    sender: str
    verdicts: tuple[LimitVerdict, ...] = ()

    def encode(self) -> bytes:
        """As it is sent."""
        return orjson.dumps({"sender": self.sender, "verdicts": [dataclasses.asdict(each) for each in self.verdicts]})

    @classmethod
    def decode(cls, data: bytes) -> Reply:
        """As it was sent.

        Raises:
            MessageError: it is none.
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
