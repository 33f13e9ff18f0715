"""Map from response ids to the servers that store the responses: only the server that generated a response stores it.

The gateway chooses the id of each response (`RESPONSE_ID_HEADER`) unless the request's body contains one, so it knows
the id without reading the response, if the server is Stoker's engine. The client's request id is not used as the id,
because services forward their callers' ids, so several requests may have the same id. Earlier versions of Stoker's
engine derive the response id from the request id (`resp_ID_ENDING`, with a random ending), so the request id is
recorded too.

Clients choose some of the ids, so each owner has a separate namespace: an owner cannot change another's lookups.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

#: Maximum number of recorded ids; a server stores 4,096 responses.
MAX_NAMES: Final = 131_072
_ENDING: Final = 9  # length of an underscore and eight hexadecimal digits


@dataclass(frozen=True, slots=True)
class Holder:
    """Server that stores a response.

    Attributes:
        model: served name of the model that generated it.
        server: ``IP:PORT``.
    """

    model: str
    server: str


class ResponseHolders:
    """The servers that store the newest responses, by response id.

    Args:
        max_names: maximum number of recorded ids.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._holders: OrderedDict[tuple[str, str], Holder] = OrderedDict()
        # Ids of a request's response, by the model and the number of the request's pick.
        self._names: OrderedDict[tuple[str, int], list[tuple[str, str]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def sent(self, owner: str, holder: Holder, pick: int, request_id: str | None, requested_id: str | None) -> str:
        """Record a request whose response may be retrieved or continued.

        Args:
            holder: server to which it was sent.
            pick: number of the pick that routed it.
            request_id: value of its X-Request-Id header, if valid.
            requested_id: response id in its body, if any.

        Returns:
            The id under which the server is to store the response.
        """
        name = requested_id if requested_id is not None else f"resp_{uuid.uuid4().hex}"
        names = [(owner, name)]
        if requested_id is None and request_id is not None:
            names.append((owner, f"resp_{request_id}"))
        self._names[holder.model, pick] = names
        for each in names:
            self._put(each, holder)
        if len(self._names) > self._max_names:
            self._names.popitem(last=False)
        return name

    def answered(self, model: str, pick: int, server: str) -> None:
        """Record which server answered a request. It may differ from the recorded one after a retry."""
        for name in self._names.pop((model, pick), ()):
            if (holder := self._holders.get(name)) is not None and holder.server != server:
                self._holders[name] = Holder(model, server)

    def of(self, owner: str, response_id: str) -> Holder | None:
        """Return the server that stores an owner's response; None if it is not known."""
        return self._holders.get((owner, response_id)) or self._holders.get((owner, response_id[:-_ENDING]))

    def _put(self, name: tuple[str, str], holder: Holder) -> None:
        self._holders[name] = holder
        self._holders.move_to_end(name)
        if len(self._holders) > self._max_names:
            self._holders.popitem(last=False)
