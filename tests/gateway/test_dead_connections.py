"""Idle connections to a server that vanished without closing them cost no error."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from .behind_envoy import CHAT, Server, gateway


class _Forgetting(Server):
    """Resets each connection opened before `forgets` as soon as it receives data."""

    forgets = False
    dead = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        old = not self.forgets
        readuntil = reader.readuntil

        async def or_reset(separator: bytes = b"\n") -> bytes:
            head = await readuntil(separator)
            if old and self.forgets:
                self.dead += 1
                writer.transport.abort()
                raise ConnectionResetError
            return head

        reader.readuntil = or_reset  # type: ignore[method-assign, assignment]
        await super()._serve(reader, writer)


@pytest.mark.parametrize("idle", [2, 8])
def test_dead_idle_connections_to_the_only_server_cost_no_request(idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from . import behind_envoy

    monkeypatch.setattr(behind_envoy, "Server", _Forgetting)

    async def main() -> None:
        async with gateway(1) as at:
            (server,) = at.servers
            assert isinstance(server, _Forgetting)
            at.picker.destination = f"{server.address},{server.address}"  # as the picker names a single server
            clients = [aiohttp.ClientSession() for _ in range(idle)]

            async def ask(client: aiohttp.ClientSession) -> int:
                async with client.post(at.url + CHAT, data=b"{}") as answer:
                    await answer.read()
                    return answer.status

            server.does = "hang"
            first = [asyncio.create_task(ask(client)) for client in clients]
            await server.until_requests(idle)  # concurrent, so each has its own connection
            server.does = "answer"
            server.more.set()
            assert await asyncio.gather(*first) == [200] * idle
            server.forgets = True
            assert await asyncio.gather(*map(ask, clients)) == [200] * idle
            assert server.dead
            for client in clients:
                await client.close()

    asyncio.run(main())
