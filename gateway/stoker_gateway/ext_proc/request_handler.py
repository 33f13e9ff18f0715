"""Handling of a request: the picker answers it, sends it to a server, or rejects it.

key ─► path and method ─► /v1/models         answered from the model registry
                       ─► /v1/responses/ID   server that stores the response ─┐
                       ─► /openapi.json      server of the key's first model ─┼─► limits of the key ─► queue ─► server
                       ─► others             model and prompt in the body    ─┘

If keys are required, a request without a valid key is rejected before its body is read, and models that its key may not
use are hidden from it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from stoker_common.errors import NotFoundError, RequestError
from stoker_common.scaling.signals import EndpointKey
from stoker_gateway.ext_proc import credentials, rate_reservation
from stoker_gateway.ext_proc.answers import REQUEST_ID, LocalReply, model_reply, models_reply
from stoker_gateway.ext_proc.body_reader import BodyReader
from stoker_gateway.ext_proc.errors import (
    HeldError,
    MediaTypeError,
    MethodError,
    SaturatedError,
    StartError,
    TooLargeError,
    UnavailableError,
)
from stoker_gateway.ext_proc.exchange import Exchange, Route
from stoker_gateway.ext_proc.forms import is_form
from stoker_gateway.ext_proc.hold import EndpointHold
from stoker_gateway.ext_proc.metrics import PickerMetrics
from stoker_gateway.ext_proc.model_cards import ModelCards
from stoker_gateway.ext_proc.request import ModelRequest
from stoker_gateway.ext_proc.request_limits import RequestLimits
from stoker_gateway.ext_proc.request_queue import RequestQueue, WaitTerms, not_extended
from stoker_gateway.ext_proc.response_holders import Holder, ResponseHolders
from stoker_gateway.ext_proc.scaling_report import ServedName, endpoint_report
from stoker_gateway.ext_proc.server_keys import ServerKeys
from stoker_gateway.keys.key import Key
from stoker_gateway.keys.keyring import Keyring
from stoker_gateway.limits.limiter import Limiter, LocalLimiter
from stoker_gateway.protocol.envoy_headers import ESTIMATE, GRANT, HELD_HEADER, KEY, MODEL, PICK
from stoker_gateway.protocol.paths import FORMS, MODELS, NOT_SERVED, POSTED, RESPONSES, SCHEMA, response_id
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry, Scaling
from stoker_gateway.scheduling.in_flight import InFlight
from stoker_gateway.scheduling.picker import EndpointPicker, Pick, Refusal
from stoker_gateway.scheduling.routing_request import RoutingRequest

#: Methods of `MODELS` and `SCHEMA`.
_READ_METHODS: Final = ("GET", "HEAD")
#: Retry-After in seconds, for errors that an administrator must fix.
_REFUSED_S: Final = 5.0
#: If a request has taken longer than this before the choice of a server, in seconds, that time counts as time in the
#: queue, because the proxy's timeout covers both.
_READ_S: Final = 0.5
#: Seconds by which the proxy's extended timeout exceeds the remaining hold.
_EXTENSION_S: Final = 30.0

#: Sets the proxy's timeout for the decision to the given number of seconds from now.
Extend = Callable[[float], Awaitable[None]]
#: Called with the served name of a request's model.
OnModel = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Call:
    """Data of one call of `RequestHandler.decide`.

    Attributes:
        began: monotonic time at which handling began, after the whole body had arrived, in seconds.
        num_bytes: size of the request's body.
        extend, on_model: see `RequestHandler.decide`.
    """

    began: float
    num_bytes: int
    extend: Extend
    on_model: OnModel


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Head of a request.

    Attributes:
        path: path without the query.
        header: returns a header's value by its name in lower case; empty if it is absent.
        subset: servers to which the request may be sent; None means all.
    """

    method: str
    path: str
    header: Callable[[str], str]
    subset: frozenset[str] | None = None

    @classmethod
    def of(cls, exchange: Exchange) -> RequestHead:
        """Return the head of an exchange's request."""
        path = exchange.header(":path").partition("?")[0]
        return cls(exchange.header(":method"), path, exchange.header, exchange.subset)

    @property
    def request_id(self) -> str | None:
        """Value of X-Request-Id, if Stoker's engine accepts it as an id; None otherwise."""
        value = self.header("x-request-id")
        return value if REQUEST_ID.fullmatch(value) else None


class RequestHandler:
    """Routes, answers or rejects requests. Used from one event loop.

    Args:
        pickers: picker of each endpoint, by served name. The caller reports to them, and then calls `wake`.
        clock: monotonic clock, in seconds.
        keyring: valid keys; None means that requests need no key, may use all models, and keep their credentials.
        wall: clock for the expiry of keys: seconds since 1970.
        limiter: enforces the keys' limits; the default is a `LocalLimiter`.
        reports_all: whether `scaling_report` also contains endpoints without scaling.
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
        reports_all: bool = False,
    ) -> None:
        self._limits = limits
        self._reports_all = reports_all
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
        #: Holds of InferenceEndpoints with scaling, and served names of reported ones, by InferenceEndpoint.
        self._holds: dict[EndpointKey, EndpointHold] = {}
        self._served_names: dict[EndpointKey, dict[str, ServedName]] = {}
        self._in_flight: dict[str, InFlight] = {}
        self.update(model_registry, pickers)

    def update(self, model_registry: ModelRegistry, pickers: Mapping[str, EndpointPicker]) -> None:
        """Replace the model registry and the pickers. Requests that wait for a removed model, or for a model with a new
        picker, are rejected."""
        previous, self._queues = self._queues, {}
        for name in model_registry.endpoints:
            if name in previous and self._pickers[name] is pickers[name]:
                self._queues[name] = previous.pop(name)
            else:
                limits = self._limits
                self._queues[name] = RequestQueue(pickers[name], limits.max_waiting, limits.max_wait_s, self._clock)
                self._metrics.queue_length.labels(name).set_function(self._queues[name].num_queued)
        for name, queue in previous.items():
            queue.close()
            if name not in model_registry.endpoints:
                self._metrics.forget(name)
        self._model_registry, self._pickers = model_registry, dict(pickers)
        self._update_holds()
        servers = {server for endpoint in model_registry.endpoints.values() for server in endpoint.servers}
        self._cards.keep(servers)
        self._server_keys.keep(servers)

    def _update_holds(self) -> None:
        """Set the hold of each queue, and the endpoints to report. Existing holds and counts are kept."""
        now, previous, self._holds, self._served_names = self._clock(), self._holds, {}, {}
        in_flight, self._in_flight = self._in_flight, {}
        for name, endpoint in self._model_registry.endpoints.items():
            queue, scaling = self._queues[name], endpoint.scaling
            if scaling is None:
                queue.hold = None
                self._metrics.forget_holds(name)
            else:
                hold = self._holds.get(scaling.key) or previous.get(scaling.key)
                if hold is None:
                    hold = EndpointHold(scaling, self._limits.max_held, self._limits.max_held_bytes, now)
                hold.update(scaling, now)
                self._holds[scaling.key] = queue.hold = hold
                self._metrics.held_requests.labels(name).set_function(queue.num_held)
            key = scaling.key if scaling is not None else endpoint.resource
            if key is not None and (scaling is not None or self._reports_all):
                self._in_flight[name] = in_flight[name] if name in in_flight else InFlight(now)
                served = ServedName(queue, self._pickers[name], self._in_flight[name])
                self._served_names.setdefault(key, {})[name] = served

    def update_models(self, server: str, answer: bytes, authorization: str = "") -> None:
        """Record the body of a server's response to ``GET /v1/models``, and the ``Authorization`` that the server
        accepted (empty if there was none)."""
        self._cards.update(server, answer)
        self._server_keys.accepted(server, authorization, self._model_registry.endpoints.values())

    def set_keyring(self, keyring: Keyring | None) -> None:
        """Replace the valid keys; None means that requests need no key."""
        self._keyring = keyring

    def wake(self, model: str) -> None:
        """Retry a model's queued requests, because its servers may have room now."""
        if (queue := self._queues.get(model)) is not None:
            queue.wake()

    def awaited(self) -> set[str]:
        """Return the servers for which requests of endpoints with scaling wait."""
        endpoints = self._model_registry.endpoints
        return {
            server
            for key in self._holds
            for name, served in self._served_names[key].items()
            if len(served.queue)
            for server in endpoints[name].servers
        }

    def scaling_report(self) -> list[dict[str, Any]]:
        """Return the report for autoscalers: one entry for each reported endpoint."""
        now = self._clock()
        return [
            endpoint_report(key, names.values(), self._holds.get(key), now) for key, names in self._served_names.items()
        ]

    @property
    def is_draining(self) -> bool:
        """Whether any endpoint with a current drain id may have active requests."""
        now = self._clock()
        return any(
            hold.drain_id(now)
            and not all(each.in_flight.is_certainly_idle() for each in self._served_names[key].values())
            for key, hold in self._holds.items()
        )

    @property
    def needs_counts(self) -> bool:
        """Whether Envoy's counts of active requests are needed to correct the counts of this class."""
        return any(each.needs_count or len(each) for each in self._in_flight.values())

    def counted(self, active: Mapping[str, int], requested_at: float) -> None:
        """Record Envoy's counts of active requests by cluster, which were requested at `requested_at`. An absent
        cluster has no active request."""
        for name, in_flight in self._in_flight.items():
            in_flight.counted(active.get(self._model_registry.endpoints[name].cluster, 0), requested_at)

    def ended(self, model: str, pick: int) -> None:
        """Record that a request has ended."""
        if (in_flight := self._in_flight.get(model)) is not None:
            in_flight.ended(pick)
            self._active(self._model_registry.endpoints[model])

    def _active(self, endpoint: Endpoint) -> None:
        if endpoint.scaling is not None:
            self._holds[endpoint.scaling.key].active_at = self._clock()

    async def close(self) -> None:
        """Close the queues and the body reader."""
        for queue in self._queues.values():
            queue.close()
        await self._reader.close()

    def at_once(self, head: RequestHead) -> LocalReply | None:
        """Return the response if the request's head determines it, else None.

        Raises:
            RequestError: the request is rejected whatever its body is.
        """
        key, path = self._key(head), head.path
        if path == MODELS or path.startswith(f"{MODELS}/"):
            if head.method not in _READ_METHODS:
                raise MethodError(*_READ_METHODS)
            if path == MODELS:
                endpoints = self._model_registry.endpoints.values()
                return models_reply((each for each in endpoints if key is None or key.may_use(each.name)), self._cards)
            return model_reply(self._endpoint(unquote(path.removeprefix(f"{MODELS}/")), key), self._cards)
        if path == SCHEMA:
            if head.method not in _READ_METHODS:
                raise MethodError(*_READ_METHODS)
            self._first_endpoint(key)
            return None
        if path not in POSTED and response_id(path) is None:
            raise NotFoundError(NOT_SERVED)
        if head.method != "POST" and path in POSTED:
            raise MethodError("POST")
        if path in POSTED:
            _check_kind(head)
        return None

    async def decide(
        self,
        head: RequestHead,
        body: bytes,
        extend: Extend = not_extended,
        on_model: OnModel = lambda _: None,
    ) -> Route:
        """Return the route of a request that `at_once` did not answer.

        Args:
            extend: awaited once if the request is held.
            on_model: called once the request's model is found, hence only if it is served and the key may use it.

        Raises:
            RequestError: the request is rejected.
        """
        key = self._key(head)  # it may have been revoked while the body arrived
        call = _Call(self._clock(), len(body), extend, on_model)
        if head.path == SCHEMA:
            endpoint = self._first_endpoint(key)
            request, routing = ModelRequest(endpoint.name), RoutingRequest(subset=head.subset)
            return await self._route(head, endpoint, request, routing, key, call)
        if head.path not in POSTED:
            return await self._to_holder(head, key, call)
        request = await self._reader.read(head.path, body, head.header("content-type"), _owner_of(head, key))
        return await self._to_server(head, request, key, call)

    def answered(self, model: str, pick: int, server: str) -> None:
        """Record which server answered a request; later requests for the stored response go there."""
        self._holders.answered(model, pick, server)

    def undo(self, route: Route) -> None:
        """Release what was reserved for a route that the proxy did not receive."""
        self.ended(str(route.metadata[MODEL]), int(route.metadata[PICK]))
        if isinstance(grant := route.metadata.get(GRANT), str):
            self._limiter.settle(grant, 0, self._clock())

    def count_as_used(self, route: Route) -> None:
        """Settle the reservation for a route that the proxy may not have read: all reserved tokens count as used, and
        the request no longer counts as concurrent, because its end may never be reported."""
        if isinstance(grant := route.metadata.get(GRANT), str):
            self._limiter.settle(grant, None, self._clock())

    def too_large(self) -> RequestError:
        """Return the error for a body that exceeds the limit."""
        return TooLargeError(f"the request body is larger than {self._limits.max_body_bytes} bytes")

    def _key(self, head: RequestHead) -> Key | None:
        return None if self._keyring is None else credentials.key_of(self._keyring, head.header, self._wall())

    def _endpoint(self, model: str, key: Key | None) -> Endpoint:
        endpoint = self._model_registry.endpoints.get(model)
        if endpoint is None or (key is not None and not key.may_use(model)):
            raise NotFoundError(
                f"the model {model[:200]!r} is not served here; GET /v1/models lists the available models",
                "model",
                "model_not_found",
            )
        return endpoint

    def _first_endpoint(self, key: Key | None) -> Endpoint:
        """Return the first endpoint that the key may use, for requests that name no model."""
        endpoints = self._model_registry.endpoints.values()
        endpoint = next((each for each in endpoints if key is None or key.may_use(each.name)), None)
        if endpoint is None:
            raise NotFoundError("no model is available for this request")
        return endpoint

    async def _to_holder(self, head: RequestHead, key: Key | None, call: _Call) -> Route:
        name = unquote(response_id(head.path) or "")
        holder = self._holders.of(_owner_of(head, key), name)
        if holder is None:
            raise NotFoundError(f"the response {name[:200]!r} was not found", "response_id")
        routing = RoutingRequest(held_by=holder.server, subset=head.subset)
        request = ModelRequest(holder.model)
        return await self._route(head, self._endpoint(holder.model, key), request, routing, key, call)

    async def _to_server(self, head: RequestHead, request: ModelRequest, key: Key | None, call: _Call) -> Route:
        endpoint = self._endpoint(request.model, key)
        session, held_by = request.session, None
        if endpoint.session_header is not None:
            session = head.header(endpoint.session_header) or session
        if request.previous_response_id is not None:
            holder = self._holders.of(_owner_of(head, key), request.previous_response_id)
            held_by = holder.server if holder is not None and holder.model == request.model else None
        routing = RoutingRequest(request.chain, request.size, session, held_by, head.subset)
        route = await self._route(head, endpoint, request, routing, key, call)
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
        routing: RoutingRequest,
        key: Key | None,
        call: _Call,
    ) -> Route:
        call.on_model(endpoint.name)
        if endpoint.refusal is not None:
            raise UnavailableError(f"the model {endpoint.name!r} is not available: {endpoint.refusal}", _REFUSED_S)
        self._active(endpoint)
        known: dict[str, str | int] = {MODEL: endpoint.name, ESTIMATE: request.prompt_tokens}
        if key is None:
            pick = await self._pick(head, endpoint, routing, key, call)
            known |= {PICK: pick.number, **_held(pick)}
            if self._keyring is None:  # a keyring may have been set while the request waited
                return Route(endpoint.cluster, pick.servers, (), (), known)
            return self._with_key(endpoint, pick, known)
        async with rate_reservation.reserved(self._limiter, key, request, self._clock) as grant:
            pick = await self._pick(head, endpoint, routing, key, call)
            known |= {PICK: pick.number, KEY: key.id, GRANT: grant.id, **grant.standing.headers(), **_held(pick)}
            return self._with_key(endpoint, pick, known)

    def _with_key(self, endpoint: Endpoint, pick: Pick, metadata: dict[str, str | int]) -> Route:
        """Return a route that replaces the client's key by the servers' own, if any."""
        servers, authorization = self._server_keys.alike(endpoint, pick.servers)
        return Route(endpoint.cluster, servers, *credentials.swapped(authorization), metadata)

    async def _pick(
        self, head: RequestHead, endpoint: Endpoint, routing: RoutingRequest, key: Key | None, call: _Call
    ) -> Pick:
        queue = self._queues[endpoint.name]
        choice = queue.at_once(routing)
        now = self._clock()
        spent_s = now - call.began
        self._metrics.decision_seconds.observe(spent_s)
        if choice is None:
            terms = WaitTerms(
                _owner_of(head, key),
                0 if key is None else key.priority,
                call.num_bytes,
                spent_s if spent_s > _READ_S else 0.0,
                lambda: self._key(head),
                lambda hold_s: call.extend(hold_s + _EXTENSION_S),
                lambda outcome, held_s: self._held(endpoint.name, outcome, held_s),
            )
            choice = await queue.wait(routing, terms)
            if choice.held_s is None:
                self._metrics.queue_seconds.labels(endpoint.name).observe(self._clock() - now)
        if isinstance(choice, Refusal):
            raise self._refused(endpoint, choice)
        metrics, name = self._metrics, endpoint.name
        if (in_flight := self._in_flight.get(name)) is not None:
            in_flight.sent(choice.number, self._clock())
        metrics.picks.labels(name, choice.why).inc()
        metrics.prompt_bytes.labels(name).inc(routing.size)
        metrics.cached_prompt_bytes.labels(name).inc(routing.size * choice.cached_share)
        return choice

    def _held(self, model: str, outcome: str, held_s: float) -> None:
        """Record the outcome (`HeldOutcome`) of a request that was held or rejected instead, and the seconds that it
        waited."""
        if model in self._queues:  # the series of a removed model must not be created again
            self._metrics.held_seconds.labels(model, outcome).observe(held_s)

    def _refused(self, endpoint: Endpoint, refusal: Refusal) -> RequestError:
        """Return the client's error for a request that got no server."""
        model, retry_after_s = f"the model {endpoint.name!r}", refusal.retry_after_s
        match refusal.kind:
            case "saturated":
                return SaturatedError(f"all servers of {model} are busy; try again", retry_after_s)
            case "not started":
                failure = "" if endpoint.scaling is None else self._scaling(endpoint).start_failure
                return StartError(f"{model} cannot start: {failure}", refusal.held_s)
            case "held":
                held = f"{model} has no ready server; the request was held for {refusal.held_s or 0:.0f} s"
                return HeldError(f"{held}; try again", retry_after_s, refusal.held_s)
            case "not held":
                room = f"{self._limits.max_held} requests, {self._limits.max_held_bytes} bytes"
                text = f"{model} has no ready server, and no more requests are held for it (limit: {room}); try again"
                return HeldError(text, retry_after_s, refusal.held_s)
        return UnavailableError(f"no server of {model} can take requests now; try again", retry_after_s)

    def _scaling(self, endpoint: Endpoint) -> Scaling:
        """Return an endpoint's current scaling, which may have changed while a request waited."""
        assert endpoint.scaling is not None
        hold = self._holds.get(endpoint.scaling.key)
        return endpoint.scaling if hold is None else hold.scaling


def _held(pick: Pick) -> dict[str, str]:
    """Return the metadata for the response header `HELD_HEADER`; empty if the request was not held."""
    return {} if pick.held_s is None else {HELD_HEADER: f"{pick.held_s:.3f}"}


def _check_kind(head: RequestHead) -> None:
    encoding, kind = head.header("content-encoding").strip().lower(), head.header("content-type")
    if encoding not in ("", "identity"):
        raise MediaTypeError(f"Content-Encoding {encoding[:100]!r} is not supported; send gzip, or no encoding")
    if head.path in FORMS and not is_form(kind):
        raise MediaTypeError("this path requires a form, sent as Content-Type: multipart/form-data")
    if head.path not in FORMS and is_form(kind):
        raise MediaTypeError("this path requires a JSON object, sent as Content-Type: application/json, not a form")


def _owner_of(head: RequestHead, key: Key | None) -> str:
    """Return the owner of a request and its responses: the key's id, or without keys a digest of the credentials."""
    return credentials.digest_of(head.header) if key is None else key.id
