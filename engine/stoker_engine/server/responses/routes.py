"""/v1/responses: items in, items out; kept for a while, to be asked for again or continued by their id."""

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
from stoker_engine.server.responses.store import ResponseStore, StoredResponse

#: The request header by which a gateway names the response, so that it knows where each is kept.
RESPONSE_ID_HEADER: Final = "x-stoker-response-id"


def routes(service: Service) -> APIRouter:
    """The endpoints, for `service`."""
    router = APIRouter(route_class=JSONRoute)
    store = ResponseStore(max_conversation_bytes=service.args.frontend.max_request_bytes)

    @router.post("/v1/responses", response_model=Response)
    async def create_response(body: ResponsesRequest, request: Request) -> HTTPResponse:
        """Answers a conversation."""
        owner = _owner(request)
        before = None
        if body.previous_response_id is not None:
            before = store.get(owner, body.previous_response_id, "previous_response_id")
        # There may be very many items: the event loop answers others meanwhile.
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
        """An answer that this server made and keeps, as it was."""
        check_include(include or [])
        if stream:
            raise RequestError("an answer is streamed only while it is made; leave stream out", "stream")
        return HTTPResponse(store.get(_owner(request), response_id).response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Forgets an answer. Those that went on with it are kept, with the whole conversation."""
        store.delete(_owner(request), response_id)
        return DeletedResponse(id=response_id)

    @router.post("/v1/responses/{response_id}/cancel", response_model=Response)
    async def cancel_response(response_id: str, request: Request) -> HTTPResponse:
        """Refused: only what runs in the background can be cancelled so, and nothing does here."""
        store.get(_owner(request), response_id)
        raise RequestError(
            "only a background response can be cancelled, and this server makes none; close the connection to end one "
            "that is being made",
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
        """What an answer was made from: the conversation before it, and the input."""
        check_include(include or [])
        stored = store.get(_owner(request), response_id)
        return await asyncio.to_thread(_listed, stored, limit, order, after)

    return router


def _chat(body: ResponsesRequest, before: StoredResponse | None) -> tuple[list[Item], ChatRequest]:
    """The conversation up to its input, and the request that all of it makes."""
    history = [] if before is None else items.from_json(before.items)
    return history, body.to_request(history)


def _response_id(request: Request, body: ResponsesRequest) -> str:
    """What an answer is called. A proxy may give several requests the same id; answers are found by theirs."""
    if body.request_id is not None:
        return body.request_id
    requested = request.headers.get(RESPONSE_ID_HEADER, "")
    if REQUEST_ID.fullmatch(requested):
        return requested
    state = request.scope["state"]
    made = f"resp_{state['request_id']}"
    return f"{made}_{uuid.uuid4().hex[:8]}" if state["request_id_given"] else made


def _owner(request: Request) -> bytes:
    """Whose answers a request may see: those that were made with the same key. The key itself is not kept.

    Where this server wants none, a proxy may have checked one, in whichever header: they all must be the same.
    """
    key: bytes | None = request.scope["state"].get("api_key")
    if key is not None:
        return key
    credentials = [request.headers.get(name, "").strip() for name in ("authorization", "x-api-key")]
    return hashlib.sha256("\n".join(credentials).encode("latin-1", "replace")).digest()


def _listed(stored: StoredResponse, limit: int, order: Literal["asc", "desc"], after: str | None) -> ItemList:
    """A page of what an answer was made from.

    Raises:
        RequestError: `after` names no item of it.
    """
    found = items.from_json(stored.items)[: stored.num_input]
    if order == "desc":
        found.reverse()
    if after is not None:
        matching = [index for index, item in enumerate(found) if item.id == after]
        if not matching:
            raise RequestError(f"there is no item {after[:200]!r} to list what comes after it", "after")
        found = found[matching[0] + 1 :]
    page = found[:limit]
    return ItemList(
        data=[items.listed(item) for item in page],
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(found) > limit,
    )
