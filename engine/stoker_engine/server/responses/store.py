"""Stored responses, for retrieval and `previous_response_id`: in memory, and limited in number and size.

Nothing is shared with other servers, and nothing survives the server's process. If the store has too many bytes, the
owner of the most bytes loses its least recently used response; if it has too many responses, the owner of the most
responses does. So no owner can displace all responses of others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from stoker_common.errors import NotFoundError

#: Maximum size of all stored JSON in bytes.
MAX_BYTES: Final = 64 * 2**20
#: Maximum number of responses.
MAX_RESPONSES: Final = 4096


@dataclass(frozen=True)
class StoredResponse:
    """A response, as JSON.

    Attributes:
        response: the response as returned.
        items: the conversation including the response's output.
        num_input: number of items, at the start of `items`, that the response was generated from.
    """

    response: bytes
    items: bytes
    num_input: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by owner and id. Used from the event loop only.

    Args:
        max_bytes: maximum size of all responses in bytes.
        max_responses: maximum number of responses.
        max_conversation_bytes: maximum size of one response's items in bytes, because continuing them is as much work
            as a body of that size.
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
        """Store a response; the owner's older response with the same id is replaced.

        Returns:
            Whether the response is stored. If it is too large, it is not stored and displaces nothing.
        """
        if response.size > self._max_bytes or len(response.items) > self._max_conversation_bytes:
            return False
        owned = self._owners.setdefault(owner, _OwnerResponses())
        owned.pop(response_id)
        owned.put(response_id, response)
        while self._has_too_many_bytes:
            max(self._owners.values(), key=lambda each: each.size).pop_oldest()
        while self._has_too_many_responses:
            max(self._owners.values(), key=lambda each: len(each.responses)).pop_oldest()
        self._forget_empty()
        return owner in self._owners and response_id in self._owners[owner].responses

    def get(self, owner: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        """Return the response with that id.

        Args:
            param: request field that refers to it.

        Raises:
            NotFoundError: this server does not store it, or not for this owner.
        """
        owned = self._owners.get(owner)
        if owned is None or response_id not in owned.responses:
            raise NotFoundError(
                f"response {response_id[:200]!r} is not stored here: only the server that created a response stores "
                "it, until it restarts or runs out of space, and only for the API key that requested it; "
                "send the conversation itself in input",
                param,
                "response_not_found",
            )
        owned.responses.move_to_end(response_id)
        return owned.responses[response_id]

    def delete(self, owner: bytes, response_id: str) -> None:
        """Delete the response with that id.

        Raises:
            NotFoundError: this server does not store it, or not for this owner.
        """
        self.get(owner, response_id)
        self._owners[owner].pop(response_id)
        self._forget_empty()

    @property
    def _has_too_many_bytes(self) -> bool:
        return sum(owned.size for owned in self._owners.values()) > self._max_bytes

    @property
    def _has_too_many_responses(self) -> bool:
        return sum(len(owned.responses) for owned in self._owners.values()) > self._max_responses

    def _forget_empty(self) -> None:
        for owner in [owner for owner, owned in self._owners.items() if not owned.responses]:
            del self._owners[owner]


class _OwnerResponses:
    """Responses of one owner, least recently used first, and their size in bytes."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        self.responses[response_id] = response
        self.size += response.size

    def pop(self, response_id: str) -> None:
        response = self.responses.pop(response_id, None)
        self.size -= 0 if response is None else response.size

    def pop_oldest(self) -> None:
        self.pop(next(iter(self.responses)))
