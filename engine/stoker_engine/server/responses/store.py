"""Answers that may be asked for again, and continued: of this server only, and so many.

Nothing is shared with another server, and nothing survives a restart. When it is full, whoever holds the most loses
what they have not used for the longest time: nobody can displace all that others hold.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from stoker_common.errors import NotFoundError

#: Most bytes of JSON that are kept.
MAX_BYTES: Final = 64 * 2**20
#: Most responses.
MAX_RESPONSES: Final = 4096


@dataclass(frozen=True)
class StoredResponse:
    """One answer, as JSON.

    Attributes:
        response: as it was answered.
        items: the conversation up to its end.
        num_input: how many of the items it was made from.
    """

    response: bytes
    items: bytes
    num_input: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by owner and id. Used from the event loop only.

    Args:
        max_bytes: that are kept in all.
        max_responses: in the same way.
        max_conversation_bytes: of one response's items. Who continues with them asks for as much work as with a body
            that has them all.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_responses: int = MAX_RESPONSES,
        max_conversation_bytes: int = MAX_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_conversation_bytes = max_conversation_bytes
        self._max_responses = max_responses
        self._owners: dict[bytes, _OwnerResponses] = {}

    def put(self, owner: bytes, response_id: str, response: StoredResponse) -> bool:
        """Keeps a response, in place of an older one of that name.

        Returns:
            whether it is kept: one that is too large is not, and takes nothing from others.
        """
        if response.size > self._max_bytes or len(response.items) > self._max_conversation_bytes:
            return False
        owned = self._owners.setdefault(owner, _OwnerResponses())
        owned.pop(response_id)
        owned.put(response_id, response)
        while self._is_too_full:
            largest_owner = max(self._owners.values(), key=lambda each: (each.size, len(each.responses)))
            largest_owner.pop(next(iter(largest_owner.responses)))
        self._forget_empty()
        return owner in self._owners and response_id in self._owners[owner].responses

    def get(self, owner: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        """The response of that name.

        Args:
            param: the field that asks for it.

        Raises:
            NotFoundError: there is none here, or not for this owner.
        """
        owned = self._owners.get(owner)
        if owned is None or response_id not in owned.responses:
            raise NotFoundError(
                f"this server holds no response {response_id[:200]!r}: a response is known only to the server that "
                "made it, until it restarts or needs the room, and only to the key that asked for it; "
                "send the conversation itself in input",
                param,
                "response_not_found",
            )
        owned.responses.move_to_end(response_id)
        return owned.responses[response_id]

    def delete(self, owner: bytes, response_id: str) -> None:
        """Forgets the response of that name.

        Raises:
            NotFoundError: there is none here, or not for this owner.
        """
        self.get(owner, response_id)
        self._owners[owner].pop(response_id)
        self._forget_empty()

    @property
    def _is_too_full(self) -> bool:
        owners = self._owners.values()
        return (
            sum(owned.size for owned in owners) > self._max_bytes
            or sum(len(owned.responses) for owned in owners) > self._max_responses
        )

    def _forget_empty(self) -> None:
        for owner in [owner for owner, owned in self._owners.items() if not owned.responses]:
            del self._owners[owner]


class _OwnerResponses:
    """What one owner holds: responses, used last at the end, and the bytes of them."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        self.responses[response_id] = response
        self.size += response.size

    def pop(self, response_id: str) -> None:
        response = self.responses.pop(response_id, None)
        self.size -= 0 if response is None else response.size
