"""Clients' request ids are not unique: services forward their callers'. Only logs and headers use them."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import defaultdict
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stoker_gateway.scheduling.load import ServerLoad

from .usage.answering import behind


class _Store:
    """A server that stores responses, with ids like an engine of this version, or of an earlier one."""

    def __init__(self, names_by_header: bool) -> None:
        self._names_by_header = names_by_header
        self.kept: dict[str, Any] = {}
        self.address = ""
        self.refuses = False
        self.refused = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            name = request.path.rpartition("/")[2]
            return web.json_response(self.kept[name]) if name in self.kept else web.json_response({}, status=404)
        body = await request.json()
        if self.refuses:
            self.refused += 1
            return web.json_response({}, status=503, headers={"x-stoker-not-begun": "1"})
        if (before := body.get("previous_response_id")) is not None and before not in self.kept:
            return web.json_response({}, status=404)
        name = f"resp_{request.headers['x-request-id']}_{uuid.uuid4().hex[:8]}"
        if self._names_by_header:
            name = request.headers["x-stoker-response-id"]
        self.kept[name] = {"id": name, "input": body["input"], "usage": {"input_tokens": 3, "output_tokens": 2}}
        return web.json_response(self.kept[name], headers={"x-request-id": request.headers["x-request-id"]})

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        return runner


@pytest.mark.parametrize("names_by_header", [True, False])
def test_responses_are_found_though_requests_share_an_id(names_by_header: bool) -> None:
    chance = random.Random(3)

    async def main() -> None:
        stores = [_Store(names_by_header), _Store(names_by_header)]
        runners = [await each.start() for each in stores]
        addresses = tuple(each.address for each in stores)
        async with behind(None, addresses) as at, aiohttp.ClientSession() as client:
            made: dict[str, str] = {}
            for number in range(20):
                # An engine of an earlier version names responses by the header: only unique ids can be found there.
                headers = {"x-request-id": "shared" if names_by_header else f"r{number}"}
                body = {"model": "m", "input": f"{number} {chance.random()}" * 100}
                async with client.post(f"{at.url}/v1/responses", json=body, headers=headers) as answer:
                    assert (answer.status, answer.headers["x-request-id"]) == (200, headers["x-request-id"])
                    made[(await answer.json())["id"]] = body["input"]
            assert len(made) == 20
            assert all(each.kept for each in stores)
            for name, prompt in made.items():
                async with client.get(f"{at.url}/v1/responses/{name}") as answer:
                    assert (answer.status, (await answer.json())["input"]) == (200, prompt)
                body = {"model": "m", "input": "go on", "previous_response_id": name}
                async with client.post(f"{at.url}/v1/responses", json=body, headers={"x-request-id": "x"}) as answer:
                    assert answer.status == 200
            used = defaultdict[str, int](int)
            for _ in range(60):  # GETs send no id
                ended = await at.next_end()
                used[ended.request_id] += ended.tokens.prompt + ended.tokens.output
            assert sum(used.values()) == 40 * 5
        for runner in runners:
            await runner.cleanup()

    asyncio.run(main())


def test_response_is_found_on_the_server_that_answered_a_retry() -> None:
    async def main() -> None:
        stores = [_Store(True), _Store(True)]
        runners = [await each.start() for each in stores]
        addresses = tuple(each.address for each in stores)
        async with behind(None, addresses) as at, aiohttp.ClientSession() as client:
            stores[0].refuses = True
            # Servers with equal load are drawn: all 40 requests go to one of them once in 10^12 runs.
            for number in range(40):
                body = {"model": "m", "input": f"{number}" * 1000}
                async with client.post(f"{at.url}/v1/responses", json=body) as answer:
                    assert answer.status == 200
                    name = (await answer.json())["id"]
                await at.next_end()
                async with client.get(f"{at.url}/v1/responses/{name}") as answer:
                    assert answer.status == 200
                await at.next_end()
                for address in addresses:  # failed servers count again
                    at.picker.observe(address, ServerLoad(), time.monotonic(), time.monotonic())
            assert 0 < stores[0].refused < 40
        for runner in runners:
            await runner.cleanup()

    asyncio.run(main())
