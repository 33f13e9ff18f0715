"""Which server holds which response: only the one that made it knows it.

The gateway itself names each response (`RESPONSE_ID_HEADER`), unless the body does, so it knows where the response will
be found and need not read it. A client's request id names nothing here: services pass on their callers', so several
requests may have the same. Only engines of earlier versions name a response by it (`resp_ID_ENDING`, with an ending
that they make up), and it is remembered for them.

Clients choose some of these names, so each owner has names of its own: nobody can lead another's lookup elsewhere.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

#: How many names of responses are remembered; a server keeps 4,096 responses.
MAX_NAMES: Final = 131_072
_ENDING: Final = 9  # an underscore and eight hexadecimal digits


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a response.

    Attributes:
        model: served name of the model that made it.
        server: ``IP:PORT``.
    """

    model: str
    server: str


class ResponseHolders:
    """The holders of the newest responses.

    Args:
        max_names: how many names of responses are remembered.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._holders: OrderedDict[tuple[str, str], Holder] = OrderedDict()
        # The names of a request's response, by its model and the number of its pick.
        self._names: OrderedDict[tuple[str, int], list[tuple[str, str]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def sent(self, owner: str, holder: Holder, pick: int, request_id: str | None, asked_id: str | None) -> str:
        """A request was sent whose response may be continued.

        Args:
            owner: whose it is.
            pick: the number of the pick that sent it there.
            request_id: its id, by its header.
            asked_id: what its body would have the response called, if anything.

        Returns:
            what the response is called.
        """
        name = asked_id if asked_id is not None else f"resp_{uuid.uuid4().hex}"
        names = [(owner, name)]
        if asked_id is None and request_id is not None:
            names.append((owner, f"resp_{request_id}"))
        self._names[holder.model, pick] = names
        for each in names:
            self._put(each, holder)
        if len(self._names) > self._max_names:
            self._names.popitem(last=False)
        return name

    def answered(self, model: str, pick: int, server: str) -> None:
        """A request has ended, by this server's answer: another one's than it was sent to at first, if that failed."""
        for name in self._names.pop((model, pick), ()):
            if (holder := self._holders.get(name)) is not None and holder.server != server:
                self._holders[name] = Holder(model, server)

    def of(self, owner: str, response_id: str) -> Holder | None:
        """Who holds an owner's response, if that is known."""
        return self._holders.get((owner, response_id)) or self._holders.get((owner, response_id[:-_ENDING]))

    def _put(self, name: tuple[str, str], holder: Holder) -> None:
        self._holders[name] = holder
        self._holders.move_to_end(name)
        if len(self._holders) > self._max_names:
            self._holders.popitem(last=False)
