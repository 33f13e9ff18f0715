"""Which server holds which response: only the one that made it knows it.

A server calls the response to a request by the request's id, with an ending that it makes up (`resp_ID_ENDING`), or as
the body says. So who sends a request somewhere knows where its response will be found, and need not read it. Clients
choose both names, so each owner has names of its own: nobody can lead another's lookup elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

#: How many responses are remembered; a server keeps 4,096.
MOST: Final = 65_536
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
        most: responses that are remembered.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._holders: OrderedDict[tuple[str, str], Holder] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def sent(self, owner: str, holder: Holder, request_id: str | None, asked_id: str | None) -> None:
        """A request was sent whose response may be gone on with.

        Args:
            owner: whose it is.
            request_id: its id, by its header.
            asked_id: what its body would have the response called, if anything.
        """
        name = asked_id if asked_id is not None else None if request_id is None else f"resp_{request_id}"
        if name is None:
            return
        self._holders[owner, name] = holder
        self._holders.move_to_end((owner, name))
        if len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def of(self, owner: str, response_id: str) -> Holder | None:
        """Who holds an owner's response, if that is known."""
        return self._holders.get((owner, response_id)) or self._holders.get((owner, response_id[:-_ENDING]))
