"""``stoker gateway --kubernetes`` with real Envoy, with an endpoint that goes from one server to none and back."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from stoker_gateway.scheduling.server_pool import FIRST_REQUESTS

from ...support.waiting import until_async
from ..behind_envoy import CHAT
from .stand_in_api import ENDPOINTS, KEYS, SLICES, Object, StandInApi, endpoint, slice_of
from .test_command import _MAIN, key_secret, text

_METRICS = re.compile(r"metrics at (http://\S+)/metrics")


class Pod:
    """A server with an engine's paths.

    Attributes:
        ready: whether it reports that it is ready.
        gate: requests are answered while it is set.
        slots: number of concurrent requests; it reports further ones as waiting.
        got: prompts of the requests, in order of arrival.
    """

    def __init__(self) -> None:
        self.ready = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.got: list[str] = []
        self.num_requests = 0
        self.slots = 4
        self.address = ""
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post(CHAT, self._answer)
        self._runner = web.AppRunner(app)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        running = min(self.slots, self.num_requests)
        waiting = self.num_requests - running
        return web.Response(text=f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n")

    async def _answer(self, request: web.Request) -> web.Response:
        assert self.ready
        self.got.append((await request.json())["messages"][0]["content"])
        self.num_requests += 1
        try:
            await self.gate.wait()
        finally:
            self.num_requests -= 1
        return web.json_response({"from": self.address})


class Gateway:
    """The command, with an API server that has one endpoint with scaling."""

    def __init__(self, api: StandInApi, client: aiohttp.ClientSession, process: Any) -> None:
        self.api, self.client, self.process = api, client, process
        self.url = self.metrics = ""
        self.statuses: list[int] = []

    def say(self, phase: str, drain: str = "", **more: Any) -> None:
        """Write this to the endpoint's status, as the operator does."""
        seen: Object = endpoint("a", scaling={"minReplicas": 0, "maxReplicas": 3, "holdSeconds": 100})
        seen["status"]["scaling"] = {"phase": phase, "drain": drain, **more}
        self.api.put(ENDPOINTS, seen)

    def pods(self, *pods: Pod, ready: bool = True) -> None:
        """Set the endpoint's pods."""
        if pods:
            self.api.put(SLICES, slice_of("a", *(each.address for each in pods), ready=ready))
        else:
            self.api.delete(SLICES, "one", "a-x")

    async def ask(self, prompt: str = "") -> tuple[int, float | None]:
        """Return the status of a response, and how long its request was held."""
        data = json.dumps({"model": "org/a", "messages": [{"role": "user", "content": prompt}]}).encode()
        headers = {"Authorization": f"Bearer {text('one')}"}
        async with self.client.post(self.url + CHAT, data=data, headers=headers) as answer:
            await answer.read()
            self.statuses.append(answer.status)
            held = answer.headers.get("x-stoker-held-seconds")
            return answer.status, None if held is None else float(held)

    async def state(self) -> Object | None:
        """Return the gateway's report for the autoscaler; None if it sends none."""
        with suppress(aiohttp.ClientError):
            async with self.client.get(f"{self.metrics}/scaling") as answer:
                if answer.status == 200:
                    report = await answer.json()
                    assert report["gateway"] and report["uptimeSeconds"] >= 0
                    return next((each for each in report["endpoints"] if each["name"] == "a"), None)
        return None

    async def until(self, **expected: Any) -> Object:
        """Wait until it reports this about the endpoint."""
        last: Object = {}

        async def holds() -> bool:
            last.clear()
            last.update(await self.state() or {})
            return bool(last) and all(last.get(name) == value for name, value in expected.items())

        await until_async(holds, lambda: f"{last} is not {expected}")
        return last

    def picker(self) -> int:
        """Return the picker's process id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        names = {int(each): Path(f"/proc/{each}/cmdline").read_bytes() for each in children}
        return next(each for each, line in names.items() if b"stoker_gateway.cli.picker" in line)


@asynccontextmanager
async def gateway(folder: Path, *pods: Pod, flags: tuple[str, ...] = ("--metrics-port", "0")) -> AsyncIterator[Gateway]:
    api = StandInApi()
    env = {**os.environ}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for pod in pods:
            await pod.start()
        made = Gateway(api, client, None)
        made.say("Active")
        api.put(KEYS, key_secret("one"))
        if pods:
            made.pods(pods[0])
        api.start()
        env["KUBECONFIG"] = str(api.kubeconfig(folder))
        words = ("--kubernetes", "--namespace", "gate", "--port", "0", *flags)
        with (folder / "log").open("wb") as log:
            made.process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _MAIN, *words, stdout=asyncio.subprocess.PIPE, stderr=log, env=env
            )
        try:
            made.url = (await asyncio.wait_for(made.process.stdout.readline(), 60)).decode().split()[-1]
            found = await until_async(lambda: _METRICS.findall((folder / "log").read_text()))
            made.metrics = found[-1]
            await made.until()
            yield made
        finally:
            with suppress(ProcessLookupError):
                made.process.kill()
            await made.process.wait()
            for pod in pods:
                await pod.stop()
            with suppress(Exception):
                api.stop()
    assert "Traceback" not in (folder / "log").read_text()


def test_no_request_fails_from_one_server_to_none_and_back(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = Pod(), Pod()
        async with gateway(tmp_path, first, second) as at:
            assert await until_async(lambda: _first_answer(at)) == 200
            assert (await at.until(held=0, queued=0, inFlight=0))["engines"][0]["ready"] is True
            first.gate.clear()
            under_way = asyncio.create_task(at.ask("under way"))
            await at.until(inFlight=1, idleSeconds=0.0)

            at.say("Draining", "w1")
            await asyncio.sleep(0)
            asked = []

            async def ask_one_more() -> bool:
                """Return whether the announcement has arrived: then a request is held."""
                asked.append(asyncio.create_task(at.ask(str(len(asked)))))
                state = await at.state()
                return state is not None and state["held"] > 0

            await until_async(ask_one_more)

            async def placed() -> Any:
                """Return the report once each request has reached the first server or is held."""
                state = await at.state()
                return state if state and state["held"] + len(first.got) - 2 == len(asked) else None

            assert "drained" not in await until_async(placed)
            num_sent = len(first.got)
            first.gate.set()
            assert (await under_way)[0] == 200
            await at.until(drained="w1", inFlight=0)
            assert len(first.got) == num_sent  # it got no more requests

            at.say("Zero", "w1")
            first.ready = False
            at.pods()
            await first.stop()
            state = await at.until(engines=[])
            assert state["held"] > 0
            while len(asked) < 40:
                asked.append(asyncio.create_task(at.ask(str(len(asked)))))
                await at.until(held=len(asked) - (num_sent - 2))  # makes the order of arrival known
            second.ready = False
            at.say("Active")
            at.pods(second, ready=False)
            await until_async(lambda: _has_engines(at))
            assert not second.got
            second.gate.clear()
            second.ready = True
            in_order = [str(number) for number in range(num_sent - 2, len(asked))]
            # It has room for four and reports waiting requests, so the rest is not sent to it.
            await until_async(lambda: _reports(at, running=4, waiting=FIRST_REQUESTS - 4))
            assert sorted(second.got, key=int) == in_order[:FIRST_REQUESTS]
            await at.until(held=0, queued=len(in_order) - FIRST_REQUESTS, inFlight=FIRST_REQUESTS)
            second.gate.set()
            answers = await asyncio.gather(*asked)
            assert set(at.statuses) == {200}
            held = [seconds for _, seconds in answers if seconds is not None]
            assert len(held) == len(in_order) and min(held) > 0 and sorted(second.got, key=int) == in_order
            await at.until(held=0, queued=0, inFlight=0)
            assert (await at.ask())[1] is None

    asyncio.run(run())


def test_traffic_that_does_not_retry_passes_through_all_phases(tmp_path: Path) -> None:
    async def run() -> None:
        rng = random.Random(5)
        pods = [Pod() for _ in range(4)]
        async with gateway(tmp_path, *pods) as at:
            assert await until_async(lambda: _first_answer(at)) == 200
            going = True

            async def ask() -> None:
                while going:
                    await at.ask("x")

            asking = [asyncio.create_task(ask()) for _ in range(6)]
            for number, (leaves, comes) in enumerate(itertools.pairwise(pods)):
                for word in range(rng.randrange(3)):  # withdrawn announcements
                    at.say("Draining", f"withdrawn {number} {word}")
                    await at.until(held=6)
                    at.say("Active")
                    await at.until(held=0)
                at.say("Draining", f"w{number}")
                await at.until(drained=f"w{number}", held=6, inFlight=0)
                at.say("Zero", f"w{number}")
                await leaves.stop()  # at once: connections to it are refused
                at.pods()
                await at.until(engines=[], held=6)
                comes.ready = False
                at.say("Active")
                at.pods(comes, ready=False)
                await until_async(lambda: _has_engines(at))
                comes.ready = True
                got = len(comes.got)
                await until_async(lambda got=got, comes=comes: len(comes.got) > got + 12)
            going = False
            await asyncio.gather(*asking)
            assert set(at.statuses) == {200}

    asyncio.run(run())


def test_restarted_picker_acknowledges_no_drain_while_requests_are_in_flight(tmp_path: Path) -> None:
    async def run() -> None:
        pod = Pod()
        async with gateway(tmp_path, pod) as at:
            assert await until_async(lambda: _first_answer(at)) == 200
            pod.gate.clear()
            under_way = [asyncio.create_task(at.ask("under way")) for _ in range(3)]
            await until_async(lambda: pod.got.count("under way") == 3)
            at.say("Draining", "w1")
            os.kill(at.picker(), signal.SIGKILL)
            log = tmp_path / "log"
            at.metrics = (await until_async(lambda: _METRICS.findall(log.read_text())[1:]))[0]
            state = await at.until(inFlight=3)  # by Envoy's count
            assert "drained" not in state
            held = asyncio.create_task(at.ask("held"))
            await at.until(held=1)
            for _ in range(20):
                assert "drained" not in (await at.until(inFlight=3))
                await asyncio.sleep(0.2)  # sleeps: there is no event for a missing acknowledgement
            pod.gate.set()
            assert [status for status, _ in await asyncio.gather(*under_way)] == [200] * 3
            await at.until(drained="w1", inFlight=0, held=1)
            at.say("Active")
            assert (await held)[0] == 200

    asyncio.run(run())


def test_failed_start_refuses_all_held_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with gateway(tmp_path) as at:
            at.say("Zero")
            asked = [asyncio.create_task(at.ask(str(number))) for number in range(5)]
            await at.until(held=5)
            at.say("Active")
            await at.until(held=5)
            at.say("Active", startFailure="no node has room")
            assert {status for status, _ in await asyncio.gather(*asked)} == {503}
            await at.until(held=0)

    asyncio.run(run())


async def _first_answer(at: Gateway) -> int | None:
    """Return 200 once the gateway knows the key and the endpoint; earlier responses are ignored."""
    status, _ = await at.ask("first")
    at.statuses.clear()
    return status if status == 200 else None


async def _has_engines(at: Gateway) -> bool:
    state = await at.state()
    return state is not None and bool(state["engines"])


async def _reports(at: Gateway, **expected: float) -> bool:
    """Return whether the first engine's last report has these values."""
    state = await at.state()
    return bool(state and state["engines"]) and all(
        state["engines"][0][name] == each for name, each in expected.items()
    )
