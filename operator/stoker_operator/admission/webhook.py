"""HTTPS server of the validating webhook."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from stoker_operator.admission.review import Check, Malformed, Object, answer, objects_under_review
from stoker_operator.process.http_server import HTTPServer
from stoker_operator.process.metrics import Metrics

PATH = "/validate"
#: Maximum size of a review in bytes. An object in etcd has at most 1.5 MiB; a review has up to two versions of it.
_BODY = 8 << 20

#: Waits a limited time for data that the check of an endpoint needs, such as the model's config.json.
Learn = Callable[[Object], Awaitable[None]]

logger = logging.getLogger(__name__)


class Webhook:
    """Answers reviews between `start` and `stop`.

    Args:
        address: HOST:PORT to listen on.
        tls: the server's TLS context; None for HTTP.
        check: evaluates an endpoint; it is called in the event loop, so it must be fast.
        metrics: counts reviews.
        grace: seconds for which the server keeps answering after `stop` is called, because the API server may still
            send reviews.
        learn: awaited with an endpoint before `check`; returns when the needed data is known, or after a short timeout.
    """

    def __init__(
        self,
        address: str,
        tls: ssl.SSLContext | None,
        check: Check,
        metrics: Metrics,
        grace: float = 5,
        learn: Learn | None = None,
    ) -> None:
        self._check, self._metrics, self._grace, self._learn = check, metrics, grace, learn
        app = web.Application(client_max_size=_BODY)
        app.router.add_post(PATH, self._review)
        self._server = HTTPServer(app, address, tls)

    async def start(self) -> None:
        """Start answering.

        Raises:
            OSError: the server cannot listen on the address.
        """
        await self._server.start()

    async def stop(self) -> None:
        """Keep answering for `grace` seconds, then stop."""
        await asyncio.sleep(self._grace)
        await self._server.stop()

    @property
    def port(self) -> int:
        """Port on which the server listens; known after `start`."""
        return self._server.port

    async def _review(self, request: web.Request) -> web.Response:
        began = time.monotonic()
        verdict = "error"
        try:
            body = await _body(request)
            if self._learn and (judged := objects_under_review(body)):
                await self._learn(judged[0])
            reviewed = answer(body, self._check)
            verdict = "allowed" if reviewed["response"]["allowed"] else "denied"
            return web.json_response(reviewed)
        except Malformed as error:
            verdict = "malformed"
            return web.Response(status=400, text=f"{error}\n")
        except web.HTTPRequestEntityTooLarge as error:
            verdict = "malformed"
            return web.Response(status=413, text=f"{error.text}\n")
        except Exception:
            # The API server then applies the failurePolicy of the webhook's configuration.
            logger.exception("an admission review failed: this is a bug in the operator")
            return web.Response(status=500, text="the operator failed to check this object; see the operator's log\n")
        finally:
            self._metrics.reviewed(verdict, time.monotonic() - began)


async def _body(request: web.Request) -> object:
    try:
        parsed: object = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {error}") from None
    return parsed
