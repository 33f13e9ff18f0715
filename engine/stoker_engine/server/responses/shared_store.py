"""The stored responses of a server, whichever of its front ends created them."""

from __future__ import annotations

from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.engine.peers import Peers
from stoker_engine.server.responses.store import ResponseStore, StoredResponse


def response_store(args: FrontendArgs) -> ResponseStore:
    """Return the store of a server."""
    return ResponseStore(max_conversation_bytes=args.max_request_bytes)


class SharedResponses:
    """A `ResponseStore` in this process or, if there are several front ends, in the process that supervises them."""

    def __init__(self, args: FrontendArgs, peers: Peers | None) -> None:
        self._peers = peers
        self._store = response_store(args)

    async def put(self, owner: bytes, response_id: str, response: StoredResponse) -> bool:
        """See `ResponseStore.put`."""
        if self._peers is None:
            return self._store.put(owner, response_id, response)
        stored: bool = await self._peers.call("put_response", owner, response_id, response)
        return stored

    async def get(self, owner: bytes, response_id: str, param: str | None = None) -> StoredResponse:
        """See `ResponseStore.get`."""
        if self._peers is None:
            return self._store.get(owner, response_id, param)
        response: StoredResponse = await self._peers.call("get_response", owner, response_id, param)
        return response

    async def delete(self, owner: bytes, response_id: str) -> None:
        """See `ResponseStore.delete`."""
        if self._peers is None:
            self._store.delete(owner, response_id)
        else:
            await self._peers.call("delete_response", owner, response_id)
