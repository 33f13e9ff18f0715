"""/v1/responses: creates responses, and retrieves or continues stored ones by their id."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response as HTTPResponse

from stoker_common.errors import RequestError
from stoker_engine.server.connection.body import JSONRoute
from stoker_engine.server.connection.disconnect import until_disconnect
from stoker_engine.server.conversation.chat_run import ChatRun
from stoker_engine.server.conversation.request import ChatRequest
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.conversation.sse import EventStream, Framing
from stoker_engine.server.fields.field_types import REQUEST_ID
from stoker_engine.server.fields.logprobs import LogprobWriter
from stoker_engine.server.middleware.request_id import HEADER, request_id
from stoker_engine.server.responses import items
from stoker_engine.server.responses.answer import DeletedResponse, ItemList, Response
from stoker_engine.server.responses.items import Item
from stoker_engine.server.responses.request import ResponsesRequest, check_include
from stoker_engine.server.responses.response_run import ResponseRun
from stoker_engine.server.responses.shared_store import SharedResponses
from stoker_engine.server.responses.store import StoredResponse

#: Request header in which a gateway may choose the response's id, so that the gateway knows which server stores it.
RESPONSE_ID_HEADER: Final = "x-stoker-response-id"


def routes(service: Service) -> APIRouter:
    """Return the endpoints; `service` handles their requests."""
    router = APIRouter(route_class=JSONRoute)
    store = SharedResponses(service.args.frontend, service.peers)

    @router.post("/v1/responses", response_model=Response)
    async def create_response(body: ResponsesRequest, request: Request) -> HTTPResponse:
        """Create a response."""
        owner = _owner(request)
        before = None
        if body.previous_response_id is not None:
            before = await store.get(owner, body.previous_response_id, "previous_response_id")
        # In a thread, because very many items would block the event loop.
        history, chat = await asyncio.to_thread(_chat, body, before)
        base_id = request_id(request, body.request_id)
        run = await ChatRun.prepare(chat, service, request.receive, _response_id(request, body))
        logprobs = None
        if body.num_logprobs is not None:
            as_token_ids = service.args.frontend.return_tokens_as_token_ids
            logprobs = LogprobWriter(service.client.tokenizer.vocabulary, body.num_logprobs, as_token_ids)
        response_run = ResponseRun(body, history, run, run.generation.model, logprobs, store, owner)
        headers = {HEADER: base_id}
        if body.stream:
            framing = Framing(named=True, last=b"", error=response_run.error_event)
            return EventStream(response_run.events(), headers, run.usage, framing)
        answer = await until_disconnect(request.receive, response_run.whole())
        return HTTPResponse(answer, headers=headers, media_type="application/json")

    @router.get("/v1/responses/{response_id}", response_model=Response)
    async def retrieve_response(
        response_id: str,
        request: Request,
        include: Annotated[list[str] | None, Query(max_length=16)] = None,
        stream: bool = False,
    ) -> HTTPResponse:
        """Return a stored response."""
        check_include(include or [])
        if stream:
            raise RequestError("a stored response cannot be streamed; omit stream", "stream")
        stored = await store.get(_owner(request), response_id)
        return HTTPResponse(stored.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Delete a stored response. Responses that continue it contain the whole conversation, and stay."""
        await store.delete(_owner(request), response_id)
        return DeletedResponse(id=response_id)

    @router.post("/v1/responses/{response_id}/cancel", response_model=Response)
    async def cancel_response(response_id: str, request: Request) -> HTTPResponse:
        """Refuse: only background responses can be cancelled, which this server does not support."""
        await store.get(_owner(request), response_id)
        raise RequestError(
            "only background responses can be cancelled, and they are not supported; to cancel a response, close its "
            "connection",
            "response_id",
        )

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        include: Annotated[list[str] | None, Query(max_length=16)] = None,
    ) -> ItemList:
        """List the items that a response was generated from: the preceding conversation and the input."""
        check_include(include or [])
        stored = await store.get(_owner(request), response_id)
        return await asyncio.to_thread(_listed, stored, limit, order, after)

    return router


def _chat(body: ResponsesRequest, before: StoredResponse | None) -> tuple[list[Item], ChatRequest]:
    """Return the preceding conversation, and the request to continue it with the body's input."""
    history = [] if before is None else items.from_json(before.items)
    return history, body.to_request(history)


def _response_id(request: Request, body: ResponsesRequest) -> str:
    """Return the id of a response: the body's `request_id`, the gateway's choice, or one made of the request's id.

    A made id is unique even if a proxy gives several requests the same id.
    """
    if body.request_id is not None:
        return body.request_id
    requested = request.headers.get(RESPONSE_ID_HEADER, "")
    if REQUEST_ID.fullmatch(requested):
        return requested
    state = request.scope["state"]
    made = f"resp_{state['request_id']}"
    return f"{made}_{uuid.uuid4().hex[:8]}" if state["request_id_given"] else made


def _owner(request: Request) -> bytes:
    """Return the owner of a response, a hash of the API key: only the same key can retrieve it.

    If this server requires no key, a proxy may have checked one in either header, so the owner is a hash of both
    headers.
    """
    key: bytes | None = request.scope["state"].get("api_key")
    if key is not None:
        return key
    credentials = [request.headers.get(name, "").strip() for name in ("authorization", "x-api-key")]
    return hashlib.sha256("\n".join(credentials).encode("latin-1", "replace")).digest()


def _listed(stored: StoredResponse, limit: int, order: Literal["asc", "desc"], after: str | None) -> ItemList:
    """Return a page of the items that a response was generated from.

    Raises:
        RequestError: `after` is not the id of one of these items.
    """
    found = items.from_json(stored.items)[: stored.num_input]
    if order == "desc":
        found.reverse()
    if after is not None:
        matching = [index for index, item in enumerate(found) if item.id == after]
        if not matching:
            raise RequestError(f"item {after[:200]!r} does not exist", "after")
        found = found[matching[0] + 1 :]
    page = found[:limit]
    return ItemList(
        data=[items.listed(item) for item in page],
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(found) > limit,
    )
