"""Measure routing decisions per second of the gateway's picker, called by gRPC as Envoy does.

    python benchmarks/gateway_picker.py [--servers 16] [--decisions 4000] [--streamed] [--seed 0]

Prompts have about 512 tokens, of which the first 40 % are equal in all requests. The picker runs in its own process;
its CPU time is measured, so that the client and other load on the machine matter little.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from typing import Any

import grpc
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from stoker_gateway.ext_proc.server import PickerServer
from stoker_gateway.registry.model_registry import Endpoint, ModelRegistry
from stoker_gateway.scheduling.load import ServerLoad
from stoker_gateway.scheduling.picker import EndpointPicker

AT_ONCE = 64
HEADERS = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    ":authority": "gateway.example",
    ":scheme": "http",
    "user-agent": "OpenAI/Python 2.1.0",
    "content-type": "application/json",
    "accept": "application/json",
    "accept-encoding": "gzip, deflate",
    "authorization": "Bearer sk-0123456789abcdef",
    "x-request-id": "0d2f5f8e-1d2c-4d68-bb93-54c2df0f5ab1",
    "x-forwarded-proto": "http",
    "x-stainless-lang": "python",
    "x-stainless-runtime": "CPython",
}


async def serve(socket: str, num_servers: int) -> None:
    """Run the picker; print its CPU time in seconds for each line read from standard input."""
    servers = tuple(f"10.0.{number // 250}.{number % 250}:8000" for number in range(num_servers))
    picker = EndpointPicker()
    picker.set_servers(servers, time.monotonic())
    server = PickerServer(ModelRegistry({"m": Endpoint("m", "m", servers)}), {"m": picker})
    server.listen(f"unix:{socket}")
    await server.start()
    gc.freeze()

    async def poll() -> None:
        while True:
            now = time.monotonic()
            for each in servers:
                picker.observe(each, ServerLoad(), now, now)
            await asyncio.sleep(1)

    polling = asyncio.create_task(poll())
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, flush=True)
    polling.cancel()
    await server.stop(0)


async def measure(num_servers: int, decisions: int, streamed: bool, seed: int) -> None:
    """Send requests to the picker, and print its CPU time."""
    rng = random.Random(seed)
    bodies = [_body(rng) for _ in range(500)]
    head = ext_proc.ProcessingRequest()
    mode = ProcessingMode.FULL_DUPLEX_STREAMED if streamed else ProcessingMode.BUFFERED
    head.protocol_config.request_body_mode = mode
    for name, value in HEADERS.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/picker"
        command = [__file__, "--serve", socket, "--servers", str(num_servers)]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None and process.stdout is not None
        await process.stdout.readline()

        async def used() -> float:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"\n")
            return float(await process.stdout.readline())

        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)

            async def ask(times: int) -> None:
                for _ in range(times):
                    await _decide(stub.Process(), head, rng.choice(bodies), streamed)

            await asyncio.gather(*(ask(8) for _ in range(AT_ONCE)))
            before, began = await used(), time.perf_counter()
            await asyncio.gather(*(ask(decisions // AT_ONCE) for _ in range(AT_ONCE)))
            took, cost = time.perf_counter() - began, await used() - before
        process.stdin.close()
        await process.wait()
    done = decisions // AT_ONCE * AT_ONCE
    print(
        f"{done} decisions among {num_servers} servers, {'streamed' if streamed else 'buffered'} bodies of "
        f"{len(bodies[0])} bytes: {cost / done * 1e3:.2f} CPU ms each, so {done / cost:.0f}/s per core "
        f"({done / took:.0f}/s measured, with the client on the same machine)"
    )


async def _decide(call: Any, head: ext_proc.ProcessingRequest, body: bytes, streamed: bool) -> None:
    await call.write(head)
    if not streamed:
        await call.read()
    await call.write(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body, end_of_stream=True)))
    response = await call.read()
    assert response.HasField("dynamic_metadata"), response
    while await call.read() is not grpc.aio.EOF:
        pass


def _body(rng: random.Random) -> bytes:
    words = [f"{first}{second}" for first in ("when", "so", "river", "the", "a") for second in ("", "s", "ing", "ly")]
    beginning = " ".join(random.Random(0).choices(words, k=210))
    messages = [
        {"role": "system", "content": beginning},
        {"role": "user", "content": " ".join(rng.choices(words, k=300))},
    ]
    return json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 100}).encode()


def main() -> None:
    """Parse the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--decisions", type=int, default=4000)
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.servers))
    else:
        asyncio.run(measure(args.servers, args.decisions, args.streamed, args.seed))


if __name__ == "__main__":
    main()
