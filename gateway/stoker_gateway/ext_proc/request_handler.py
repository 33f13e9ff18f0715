"""What becomes of a request: it is answered here, sent to a server, or refused.

key ─► path and method ─► /v1/models?              answered from the model registry
                       ─► /v1/responses/ID …?      to the server that holds it
                       ─► /openapi.json?           to any server
                       ─► body: model, prompt ─► its key's limits ─► its endpoint's line ─► servers

Where there are keys, a request without one is refused before its body is read, and models that its key is not for are
as if they were not there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from stoker_common.errors import NotFoundError, RequestError
from stoker_gateway.ext_proc import credentials, rate_reservation
from stoker_gateway.ext_proc.answers import REQUEST_ID, LocalReply, model_answer, models_answer
from stoker_gateway.ext_proc.body_reader import BodyReader
from stoker_gateway.ext_proc.errors import (
    MediaTypeError,
    MethodError,
    SaturatedError,
    TooLargeError,
    UnavailableError,
)
from stoker_gateway.ext_proc.exchange import Exchange, Route
from stoker_gateway.ext_proc.forms import is_form
from stoker_gateway.ext_proc.metrics import PickerMetrics
from stoker_gateway.ext_proc.model_cards import ModelCards
from stoker_gateway.ext_proc.request import ModelRequest
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.request_queue import RETRY_AFTER_S, RequestQueue
from stoker_gateway.ext_proc.response_holders import Holder, ResponseHolders
from stoker_gateway.ext_proc.server_keys import ServerKeys
from stoker_gateway.keys.key import Key
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.limits.limiter import Limiter, LocalLimiter
from stoker_gateway.protocol.envoy_headers import ESTIMATE, GRANT, KEY, MODEL, PICK
from stoker_gateway.protocol.paths import FORMS, MODELS, POSTED, RESPONSES, SCHEMA, response_id
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.scheduling.picker import EndpointPicker, Pick, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest

#: Retry-After, in seconds, for errors that an administrator must fix.
_REFUSED_S: Final = 5.0
#: Seconds of reading a body from which on they count as waiting: the proxy waits only so long for both.
_READ_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's head.

    Attributes:
        path: without what follows a question mark.
        header: a header's value by its name in lower case; empty without one.
        subset: the only servers it may go to; None stands for all.
    """

    method: str
    path: str
    header: Callable[[str], str]
    subset: frozenset[str] | None = None

    @classmethod
    def of(cls, exchange: Exchange) -> RequestHead:
        """The head that a proxy sent."""
        path = exchange.header(":path").partition("?")[0]
        return cls(exchange.header(":method"), path, exchange.header, exchange.subset)

    @property
    def request_id(self) -> str | None:
        """Its id, as servers take it."""
        value = self.header("x-request-id")
        return value if REQUEST_ID.fullmatch(value) else None


class RequestHandler:
    """Decides about requests. Used from one event loop.

    Args:
        model_registry: which models there are.
        pickers: of their servers, by served name; whoever has them keeps them informed, and calls `wake`.
        clock: seconds.
        keyring: the keys there are; None: anyone may use all models, and credentials pass through.
        wall: the clock that keys expire by: seconds since 1970.
        limiter: keeps keys to their limits.
    """

    def __init__(
        self,
        model_registry: ModelRegistry,
        pickers: Mapping[str, EndpointPicker],
        limits: RequestLimits,
        metrics: PickerMetrics,
        clock: Callable[[], float] = time.monotonic,
        keyring: Keyring | None = None,
        wall: Callable[[], float] = time.time,
        limiter: Limiter | None = None,
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._keyring = keyring
        self._wall = wall
        self._limiter = limiter or LocalLimiter()
        self._reader = BodyReader()
        self._holders = ResponseHolders()
        self._cards = ModelCards()
        self._server_keys = ServerKeys(clock)
        self._model_registry = ModelRegistry()
        self._pickers: Mapping[str, EndpointPicker] = {}
        self._queues: dict[str, RequestQueue] = {}
        self.update(model_registry, pickers)

    def update(self, model_registry: ModelRegistry, pickers: Mapping[str, EndpointPicker]) -> None:
        """These are all models there are, from now on. Who waits for one that is gone is refused."""
        previous, self._queues = self._queues, {}
        for name in model_registry.endpoints:
            if name in previous and self._pickers[name] is pickers[name]:
                self._queues[name] = previous.pop(name)
            else:
                limits = self._limits
                self._queues[name] = RequestQueue(pickers[name], limits.max_waiting, limits.max_wait_s, self._clock)
                self._metrics.queue_length.labels(name).set_function(self._queues[name].__len__)
        for name, queue in previous.items():
            queue.close()
            if name not in model_registry.endpoints:
                self._metrics.forget(name)
        self._model_registry, self._pickers = model_registry, dict(pickers)
        servers = {server for endpoint in model_registry.endpoints.values() for server in endpoint.servers}
        self._cards.keep(servers)
        self._server_keys.keep(servers)

    def update_models(self, server: str, answer: bytes, authorization: str = "") -> None:
        """A server's answer to ``GET /v1/models``, and the ``Authorization`` that it answered to."""
        self._cards.update(server, answer)
        self._server_keys.accepted(server, authorization, self._model_registry.endpoints.values())

    def set_keyring(self, keyring: Keyring | None) -> None:
        """These are all keys there are, for all requests from now on."""
        self._keyring = keyring

    def wake(self, model: str) -> None:
        """There is news of a model's servers: some may have room."""
        if (queue := self._queues.get(model)) is not None:
            queue.wake()

    async def close(self) -> None:
        """Ends what was started."""
        for queue in self._queues.values():
            queue.close()
        await self._reader.close()

    def at_once(self, head: RequestHead) -> LocalReply | None:
        """The answer, where a request's head is enough for one.

        Raises:
            RequestError: nothing takes such a request, whatever its body is.
        """
        key, path = self._key(head), head.path
        if path == MODELS or path.startswith(f"{MODELS}/"):
            if head.method not in ("GET", "HEAD"):
                raise MethodError("this path does not take this HTTP method")
            if path == MODELS:
                endpoints = self._model_registry.endpoints.values()
                return models_answer((each for each in endpoints if key is None or key.may_use(each.name)), self._cards)
            return model_answer(self._endpoint(unquote(path.removeprefix(f"{MODELS}/")), key), self._cards)
        if path == SCHEMA:
            if head.method not in ("GET", "HEAD"):
                raise MethodError("this path does not take this HTTP method")
            self._first_endpoint(key)
            return None
        if path not in POSTED and response_id(path) is None:
            raise NotFoundError("there is no such path here")
        if head.method != "POST" and path in POSTED:
            raise MethodError("this path does not take this HTTP method")
        if path in POSTED:
            _check_kind(head)
        return None

    async def decide(self, head: RequestHead, body: bytes) -> tuple[str, Route]:
        """The model, and the servers for a request that `at_once` says nothing of.

        Raises:
            RequestError: it is refused.
        """
        key = self._key(head)  # it may have been revoked while the body came
        if head.path == SCHEMA:
            endpoint = self._first_endpoint(key)
            request, ask = ModelRequest(endpoint.name), RoutingRequest(subset=head.subset)
            return endpoint.name, await self._route(head, endpoint, request, ask, key, self._clock())
        if head.path not in POSTED:
            return await self._to_holder(head, key)
        began = self._clock()
        request = await self._reader.read(head.path, body, head.header("content-type"), _owner_of(head, key))
        return request.model, await self._to_server(head, request, key, began)

    def answered(self, model: str, pick: int, server: str) -> None:
        """A request has ended, by this server's answer."""
        self._holders.answered(model, pick, server)

    def undo(self, route: Route) -> None:
        """The proxy did not hear of this route, so the request ends here."""
        if isinstance(grant := route.metadata.get(GRANT), str):
            self._limiter.settle(grant, 0, self._clock())

    def count_as_used(self, route: Route) -> None:
        """It is unknown whether the proxy has read this route: its tokens count as used, and its request as ended,
        since its end may never be reported."""
        if isinstance(grant := route.metadata.get(GRANT), str):
            self._limiter.settle(grant, None, self._clock())

    def too_large(self) -> RequestError:
        """Why a body is refused."""
        return TooLargeError(f"the request body is larger than {self._limits.max_body_bytes} bytes")

    def _key(self, head: RequestHead) -> Key | None:
        return None if self._keyring is None else credentials.key_of(self._keyring, head.header, self._wall())

    def _endpoint(self, model: str, key: Key | None) -> Endpoint:
        endpoint = self._model_registry.endpoints.get(model)
        if endpoint is None or (key is not None and not key.may_use(model)):
            raise NotFoundError(
                f"the model {model[:200]!r} is not served here; GET /v1/models lists what is",
                "model",
                "model_not_found",
            )
        return endpoint

    def _first_endpoint(self, key: Key | None) -> Endpoint:
        """One that stands for all, for what is asked of no model."""
        endpoints = self._model_registry.endpoints.values()
        endpoint = next((each for each in endpoints if key is None or key.may_use(each.name)), None)
        if endpoint is None:
            raise NotFoundError("no model is served here")
        return endpoint

    async def _to_holder(self, head: RequestHead, key: Key | None) -> tuple[str, Route]:
        name = unquote(response_id(head.path) or "")
        holder = self._holders.of(_owner_of(head, key), name)
        if holder is None:
            raise NotFoundError(f"no response {name[:200]!r} is known here", "response_id")
        ask = RoutingRequest(held_by=holder.server, subset=head.subset)
        began, request = self._clock(), ModelRequest(holder.model)
        return holder.model, await self._route(head, self._endpoint(holder.model, key), request, ask, key, began)

    async def _to_server(self, head: RequestHead, request: ModelRequest, key: Key | None, began: float) -> Route:
        endpoint = self._endpoint(request.model, key)
        session, held_by = request.session, None
        if endpoint.session_header is not None:
            session = head.header(endpoint.session_header) or session
        if request.previous_response_id is not None:
            holder = self._holders.of(_owner_of(head, key), request.previous_response_id)
            held_by = holder.server if holder is not None and holder.model == request.model else None
        ask = RoutingRequest(request.chain, request.size, session, held_by, head.subset)
        route = await self._route(head, endpoint, request, ask, key, began)
        if head.path == RESPONSES:
            holder, pick = Holder(request.model, route.servers[0]), int(route.metadata[PICK])
            name = self._holders.sent(_owner_of(head, key), holder, pick, head.request_id, request.request_id)
            route = dataclasses.replace(route, response_id=name)
        return route

    async def _route(
        self,
        head: RequestHead,
        endpoint: Endpoint,
        request: ModelRequest,
        ask: RoutingRequest,
        key: Key | None,
        began: float,
    ) -> Route:
        if endpoint.refusal is not None:
            raise UnavailableError(f"the model {endpoint.name!r} gets no requests: {endpoint.refusal}", _REFUSED_S)
        known: dict[str, str | int] = {MODEL: endpoint.name, ESTIMATE: request.prompt_tokens}
        if key is None:
            pick = await self._pick(head, endpoint, ask, key, began)
            known |= {PICK: pick.number}
            if self._keyring is None:  # there may be one by now
                return Route(endpoint.cluster, pick.servers, (), (), known)
            return self._with_key(endpoint, pick, known)
        async with rate_reservation.reserved(self._limiter, key, request, self._clock) as grant:
            pick = await self._pick(head, endpoint, ask, key, began)
            known |= {PICK: pick.number, KEY: key.id, GRANT: grant.id, **grant.standing.headers()}
            return self._with_key(endpoint, pick, known)

    def _with_key(self, endpoint: Endpoint, pick: Pick, metadata: dict[str, str | int]) -> Route:
        """A route of a request that servers are told their own key by, in place of the client's."""
        servers, authorization = self._server_keys.alike(endpoint, pick.servers)
        return Route(endpoint.cluster, servers, *credentials.swapped(authorization), metadata)

    async def _pick(
        self, head: RequestHead, endpoint: Endpoint, ask: RoutingRequest, key: Key | None, began: float
    ) -> Pick:
        queue = self._queues[endpoint.name]
        choice = queue.at_once(ask)
        now = self._clock()
        self._metrics.decision_seconds.observe(now - began)
        if choice is None:
            priority = 0 if key is None else key.priority
            # Reading the body may have taken some of it.
            remaining_s = max(0.0, self._limits.max_wait_s - (now - began))
            try:
                async with asyncio.timeout(remaining_s if now - began > _READ_S else None):
                    choice = await queue.wait(ask, _owner_of(head, key), priority, lambda: self._key(head))
            except TimeoutError:
                choice = Refusal("saturated", RETRY_AFTER_S)
            self._metrics.queue_seconds.labels(endpoint.name).observe(self._clock() - now)
        if isinstance(choice, Refusal):
            if choice.kind == "saturated":
                raise SaturatedError(
                    f"all servers of the model {endpoint.name!r} are busy; try again", choice.retry_after_s
                )
            raise UnavailableError(
                f"no server of the model {endpoint.name!r} can take requests now; try again", choice.retry_after_s
            )
        metrics, name = self._metrics, endpoint.name
        metrics.picks.labels(name, choice.why).inc()
        metrics.prompt_bytes.labels(name).inc(ask.size)
        metrics.cached_prompt_bytes.labels(name).inc(ask.size * choice.cached_share)
        return choice


def _check_kind(head: RequestHead) -> None:
    encoding, kind = head.header("content-encoding").strip().lower(), head.header("content-type")
    if encoding not in ("", "identity"):
        raise MediaTypeError(f"Content-Encoding {encoding[:100]!r} is not known here; send gzip, or no encoding")
    if head.path in FORMS and not is_form(kind):
        raise MediaTypeError("this path takes a form, sent as Content-Type: multipart/form-data")
    if head.path not in FORMS and is_form(kind):
        raise MediaTypeError("this path takes a JSON object, sent as Content-Type: application/json, and no form")


def _owner_of(head: RequestHead, key: Key | None) -> str:
    """Whose a request is, and its responses."""
    return credentials.digest_of(head.header) if key is None else key.id
