"""Messages between replicas, as JSON.

message  the sender's identity, an increasing number, usage statements, and admission requests
reply    the replying replica's identity, and verdicts on the requests
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from stoker_gateway.keys.key import Limits
from stoker_gateway.limits.peer_reports import Statement
from stoker_gateway.limits.ratelimit_headers import Allowance, Denial, RateLimitStatus

LimitVerdict = RateLimitStatus | Denial

#: Maximum of a count, and of a duration in seconds, in a message or reply.
_MAX_COUNT: Final = 2**53
_MAX_S: Final = 1e9
#: Values of `Denial.what`.
_LIMITS: Final = ("requests", "tokens", "concurrency")


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
            uses = {key_id: _statement(each) for key_id, each in _object(fields["uses"]).items()}
            requests = tuple(
                LimitRequest(_text(each["key_id"]), _limits(each["limits"]), _count(each["tokens"]))
                for each in fields["asks"]
            )
            return cls(_text(fields["sender"]), _count(fields["number"]), uses, requests)
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
            return cls(_text(fields["sender"]), tuple(_verdict(each) for each in fields["verdicts"]))
        except (ValueError, TypeError, KeyError) as error:
            raise MessageError(f"invalid reply from a replica: {error!r}") from None


def _verdict(fields: dict[str, Any]) -> LimitVerdict:
    if "what" not in fields:
        return _standing(fields)
    if fields["what"] not in _LIMITS:
        raise ValueError(fields["what"])
    retry_after_s = fields["retry_after_s"]
    return Denial(
        fields["what"],
        _count(fields["limit"]),
        _count(fields["used"]),
        _count(fields["requested"]),
        None if retry_after_s is None else _seconds(retry_after_s),
        _standing(fields["standing"]),
    )


def _standing(fields: Any) -> RateLimitStatus:
    return RateLimitStatus(
        **{name: None if each is None else _allowance(each) for name, each in _object(fields).items()}
    )


def _allowance(fields: Any) -> Allowance:
    return Allowance(_count(fields["limit"]), _count(fields["remaining"]), _seconds(fields["reset_s"]))


def _limits(fields: Any) -> Limits:
    return Limits(**{name: None if each is None else _count(each) for name, each in _object(fields).items()})


def _statement(fields: Any) -> Statement:
    usage = {name: [[_seconds(age), _count(amount)] for age, amount in fields[name]] for name in ("requests", "tokens")}
    return {**usage, "open": _count(fields["open"])}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.100} is not an object")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is not a string")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{value!r:.100} is not a number of requests or tokens")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_S:
        raise ValueError(f"{value!r:.100} is not a duration in seconds")
    return float(value)
