"""What clients see when servers, the picker or clients fail, with Envoy's real program."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from stoker_gateway.envoy import admin
from stoker_gateway.envoy.admin import EnvoyError, LateAnswerError
from stoker_gateway.envoy.values import LISTENER
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry

from ..support.waiting import until_async
from .behind_envoy import CHAT, Gateway, gateway, registry_of
from .http_fuzz import requests


async def post(client: aiohttp.ClientSession, at: Gateway, path: str = CHAT, body: bytes = b"{}") -> tuple[int, Any]:
    """Return status and JSON of a response."""
    async with client.post(at.url + path, data=body) as answer:
        return answer.status, await answer.json()


async def _refused(client: aiohttp.ClientSession, at: Gateway) -> None:
    for path, kind in ((CHAT, "service_unavailable_error"), ("/v1/messages", "overloaded_error")):
        async with client.post(at.url + path, data=b"{}") as refused:
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert (await refused.json())["error"]["type"] == kind


async def _until_ready_says(status: int, client: aiohttp.ClientSession, at: Gateway) -> None:

    async def holds() -> bool:
        return (await client.get(at.url + "/ready")).status == status

    await until_async(holds)


def test_unanswered_request_is_retried_once_on_the_pickers_next_server() -> None:
    async def main() -> None:
        async with gateway(3) as at, aiohttp.ClientSession() as client:
            first, second, _ = at.servers

            async def post_once() -> tuple[int, Any, list[int]]:
                before = [len(each.requests) for each in at.servers]
                status, answer = await post(client, at)
                counts = [len(each.requests) - count for each, count in zip(at.servers, before, strict=True)]
                return status, answer.get("server"), counts

            assert await post_once() == (200, "a", [1, 0, 0])
            for does in ("reset", "close"):
                first.does = does
                assert await post_once() == (200, "b", [1, 1, 0])
            second.does = "reset"
            assert await post_once() == (503, None, [1, 1, 0])  # one retry, although there is a third server
            second.does = "fail"
            assert await post_once() == (500, "b", [1, 1, 0])  # a server's error is not retried,
            first.does = second.does = "refuse"
            assert await post_once() == (503, "b", [1, 1, 0])  # except "not started"
            async with client.post(at.url + CHAT, data=b"{}") as answer:
                assert not [name for name in answer.headers if name.lower().startswith("x-stoker")]
            second.does = "answer"
            status, answer = await post(client, at, body=bytes(5 << 20))
            assert (status, answer) == (200, {"server": "b", "size": 5 << 20})  # the whole body was sent again
            second.does = "answer"
            await first.stop()
            assert await post_once() == (200, "b", [0, 1, 0])

            at.picker.destination = first.address  # a single server: no other replaces it
            for _ in range(7):
                assert await post_once() == (503, None, [0, 0, 0])
            # The picker detects itself whether a server fails or has returned: Envoy follows it at once.
            await first.start()
            first.does = "answer"
            assert await post_once() == (200, "a", [1, 0, 0])

    asyncio.run(main())


def test_unanswered_requests_of_a_dead_server_are_retried_on_another() -> None:
    async def main() -> None:
        async with gateway() as at, aiohttp.ClientSession() as client:
            dying, second = at.servers
            dying.does = "hang"
            sent = [asyncio.create_task(post(client, at)) for _ in range(60)]
            await dying.until_requests(len(sent))
            await dying.stop()
            assert [status for status, _ in await asyncio.gather(*sent)] == [200] * len(sent)
            assert len(second.requests) == len(sent)

    asyncio.run(main())


def test_interrupted_response_is_interrupted_for_its_client() -> None:
    async def main() -> None:
        async with gateway() as at, aiohttp.ClientSession() as client:
            breaking, second = at.servers
            breaking.does = "break"
            got = b""
            async with client.post(at.url + CHAT, data=b"{}") as answer:
                with pytest.raises(aiohttp.ClientError):
                    async for part in answer.content.iter_any():
                        got += part
                        breaking.more.set()
            assert got == b"data: 1\n\n"
            assert not second.requests
            head, _, body = (await at.raw(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n\r\n".encode())).partition(b"\r\n\r\n")
            assert b"chunked" in head and body == b"9\r\ndata: 1\n\n\r\n"  # without the last chunk

    asyncio.run(main())


def test_requests_are_retriable_and_streams_continue_without_the_picker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with gateway(1, max_wait_s=-3) as at, aiohttp.ClientSession() as client:  # it may take two seconds
            (server,) = at.servers
            server.does = "stream"

            async def read() -> bytes:
                return b"".join([part async for part in under_way.content.iter_any()])

            async with client.post(at.url + CHAT, data=b"{}") as under_way:
                assert await under_way.content.readuntil(b"\n\n") == b"data: 1\n\n"
                at.picker.hangs = True
                await _refused(client, at)
                await at.grpc_server.stop(0)
                await _refused(client, at)
                assert len(server.requests) == 1
                async with client.get(at.url + "/health") as health:
                    assert health.status == 200
                await _until_ready_says(503, client, at)
                monkeypatch.setattr(admin, "_CHECK_INTERVAL_S", 0.01)
                with pytest.raises(EnvoyError, match="does not reach the picker"):
                    await at.envoy.watch()
                server.last = True
                server.more.set()
                assert await read() == b"data: [DONE]\n\n"

            at.picker.hangs, server.does = False, "answer"
            at.grpc_server = await at.picker.serve(at.settings.picker_socket)
            await _until_ready_says(200, client, at)
            assert (await post(client, at))[0] == 200

    asyncio.run(main())


def test_picker_death_after_its_decision_interrupts_no_stream() -> None:
    async def main() -> None:
        async with gateway(1) as at, aiohttp.ClientSession() as client:
            at.picker.lingers = True
            (server,) = at.servers
            server.does = "stream"
            async with client.post(at.url + CHAT, data=b"{}") as under_way:
                assert await under_way.content.readuntil(b"\n\n") == b"data: 1\n\n"
                await at.grpc_server.stop(0)
                await _refused(client, at)
                server.last = True
                server.more.set()
                assert await under_way.read() == b"data: [DONE]\n\n"

    asyncio.run(main())


def test_client_headers_cannot_choose_a_server_without_the_picker() -> None:
    async def main() -> None:
        async with gateway(1) as at, aiohttp.ClientSession() as client:
            (server,) = at.servers
            named = {"x-stoker-cluster": at.picker.cluster, "x-gateway-destination-endpoint": server.address}
            await at.grpc_server.stop(0)
            for method, path in (
                ("POST", CHAT),
                ("GET", "/v1/models"),
                ("POST", "/v1/responses"),
                ("GET", "/v1/models/m"),
            ):
                body = b'{"model": "m"}' if method == "POST" else None
                async with client.request(method, at.url + path, data=body, headers=named) as refused:
                    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert server.requests == [] and server.listed == 0

    asyncio.run(main())


def _envoy() -> int:
    """Return the process id of the gateway's Envoy. Earlier tests may have left other children."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    [envoy] = [child for child in children if b"envoy" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]]
    return int(envoy)


def test_late_responses_of_envoy_interrupt_no_stream_during_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with gateway(1) as at, aiohttp.ClientSession() as client:
            monkeypatch.setattr(admin, "_TIMEOUT_S", 0.1)
            (server,) = at.servers
            server.does = "stream"
            envoy = _envoy()
            async with client.post(at.url + CHAT, data=b"{}") as under_way:
                assert await under_way.content.readuntil(b"\n\n") == b"data: 1\n\n"
                drained = asyncio.create_task(at.envoy.drain(60))
                for _ in range(3):
                    os.kill(envoy, signal.SIGSTOP)
                    await asyncio.sleep(0.3)  # sleeps: time for which Envoy is stopped
                    os.kill(envoy, signal.SIGCONT)
                    await asyncio.sleep(0.3)  # sleeps: time for which it runs
                assert not drained.done()
                server.last = True
                server.more.set()
                assert await under_way.read() == b"data: [DONE]\n\n"
            assert await drained == 0
            os.kill(envoy, signal.SIGSTOP)
            with pytest.raises(LateAnswerError, match="within 0"):
                await at.envoy.drain(0.3)
            os.kill(envoy, signal.SIGKILL)
            await asyncio.wait_for(at.envoy.ended(), 60)
            with pytest.raises(EnvoyError, match="does not answer"):
                await at.envoy.drain(600)

    asyncio.run(main())


def test_fail_open_routes_requests_without_the_picker() -> None:
    async def main() -> None:
        async with gateway(2, max_wait_s=-4.5, fail_open="cluster-m") as at, aiohttp.ClientSession() as client:

            async def post_many() -> list[int]:
                """Return how many of 24 requests each server got; none of them fails.

                Envoy draws a server for each request: one of two gets none in 1 of 8 million cases.
                """
                before = [len(each.requests) for each in at.servers]
                assert [(await post(client, at))[0] for _ in range(24)] == [200] * 24
                return [len(each.requests) - number for each, number in zip(at.servers, before, strict=True)]

            async def until_all_go_to(number: int) -> None:
                """Retry: on a busy machine the picker may take longer than Envoy's half second."""
                while (await post_many())[number] < 24:
                    pass

            for number, server in enumerate(at.servers):
                at.picker.destination = server.address
                await until_all_go_to(number)
            at.picker.hangs = True
            assert min(await post_many()) > 0
            await at.grpc_server.stop(0)
            assert min(await post_many()) > 0
            await _until_ready_says(503, client, at)
            assert min(await post_many()) > 0
            # Even without the picker, requests reach neither forbidden paths nor other clusters.
            async with client.get(at.url + "/metrics") as answer:
                assert answer.status == 404
            async with client.post(at.url + CHAT, data=b"{}", headers={"X-Stoker-Cluster": "other"}) as answer:
                assert answer.status == 200

            at.picker.hangs = False
            at.grpc_server = await at.picker.serve(at.settings.picker_socket)
            await _until_ready_says(200, client, at)
            await until_all_go_to(1)

    asyncio.run(main())


def test_servers_and_models_come_and_go_while_streams_are_under_way() -> None:
    async def main() -> None:
        async with gateway() as at, aiohttp.ClientSession() as client:
            going, staying = at.servers
            going.does = "stream"
            async with client.post(at.url + CHAT, data=b"{}") as under_way:
                at.files.write(registry_of(staying))
                await at.until("cluster.cluster-m.membership_total", 1)
                at.picker.destination = going.address
                for _ in range(3):
                    assert (await post(client, at))[0] == 503
                at.picker.destination = f"{going.address},{staying.address}"
                assert (await post(client, at))[1]["server"] == "b"
                at.files.write(ModelRegistry({"n": Endpoint("n", "cluster-n", (staying.address,))}))
                await at.until("cluster_manager.cluster_removed", 1)
                assert (await post(client, at))[0] == 503
                at.picker.cluster = "cluster-n"
                assert (await post(client, at))[1]["server"] == "b"
                assert len(going.requests) == 1
                going.last = True
                going.more.set()
                assert await under_way.read() == b"data: 1\n\ndata: [DONE]\n\n"

    asyncio.run(main())


def test_slow_clients_take_little_memory_and_time() -> None:
    async def main() -> None:
        async with gateway(1, headers_s=0.3, upload_s=0.6) as at, aiohttp.ClientSession() as client:
            (server,) = at.servers
            head = b"POST %s HTTP/1.1\r\nhost: x\r\n" % CHAT.encode()
            late = [at.raw(head, then=b"a: b\r\n"), at.raw(head + b"content-length: 10000\r\n\r\n", then=b"x")]
            for answer in await asyncio.gather(*late):
                assert answer.startswith(b"HTTP/1.1 408") and answer.count(b"HTTP/1.1") == 1
            assert not server.requests

            server.does = "flood"
            writers = []
            for _ in range(4):  # clients that read nothing
                _, writer = await asyncio.open_connection("127.0.0.1", at.port, limit=1)
                writer.transport.pause_reading()
                writer.write(head + b"content-length: 2\r\n\r\n{}")
                writers.append(writer)
            before, at_rest = -1, 0
            while at_rest < 5:
                before, at_rest = server.sent, at_rest + 1 if server.sent == before > 0 else 0
                await asyncio.sleep(0.1)  # sleeps: there is no event for the absence of data
            sockets = 4 * (12 << 20)  # twice the kernel's socket buffers
            assert server.sent < sockets + 4 * (6 << 20) < 4 * at.settings.max_body_bytes
            server.does = "answer"

            async def is_answered() -> bool:
                """On a busy machine the first attempt may take longer than `upload_s`."""
                return (await post(client, at))[0] == 200

            await until_async(is_answered)
            for writer in writers:
                writer.transport.abort()
            await at.until(f"http.{LISTENER}.downstream_rq_active", 0)

    asyncio.run(main())


def test_bodies_up_to_the_limit_pass_in_each_version_of_http() -> None:
    async def main() -> None:
        async with gateway(1, max_body_bytes=21 << 20) as at, aiohttp.ClientSession() as client:
            body = b"x" * (20 << 20)
            assert (await post(client, at, body=body))[1]["size"] == len(body)
            assert (await post(client, at, body=body + b"x" * (2 << 20)))[0] == 413
            async with grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:  # a client of HTTP/2
                with pytest.raises(grpc.aio.AioRpcError):  # the server does not speak gRPC
                    await channel.unary_unary(CHAT)(body)
                assert len(at.servers[0].requests) == 2
                assert at.servers[0].body[5:] == body  # behind gRPC's prefix

    asyncio.run(main())


@pytest.mark.slow
def test_wrong_requests_get_4xx_and_smuggle_nothing() -> None:
    async def main() -> None:
        # The picker's time counts as upload time, and leads to a 504 if it is too long; therefore the limits are
        # generous.
        async with gateway(2, headers_s=0.5, upload_s=5) as at, aiohttp.ClientSession() as client:
            named, unnamed = at.servers
            at.picker.destination = named.address
            at_once = asyncio.Semaphore(100)

            async def ask(text: bytes) -> None:
                async with at_once:
                    answer = await at.raw(text)
                statuses = re.findall(rb"HTTP/1\.[01] (\d)\d\d", answer)
                assert statuses and b"5" not in statuses, (text, answer)

            await asyncio.gather(*map(ask, requests(1000, seed=7)))
            assert not unnamed.requests
            assert len(named.requests) > 60
            for head in named.requests:
                line, *fields = head.lower().split(b"\r\n")
                assert re.fullmatch(rb"[a-z]+ (/v1/\S*|/(de)?tokenize) http/1\.1", line), head
                assert b"/.." not in line.partition(b"?")[0], head
                names = [field.partition(b":")[0] for field in fields]
                assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1, head
                assert not [name for name in names if name.startswith(b"x-envoy")], head
                assert b"x-gateway-destination-endpoint: " + named.address.encode() in fields, head
            assert (await post(client, at))[0] == 200
            assert (await client.get(at.url + "/ready")).status == 200

    asyncio.run(main())
