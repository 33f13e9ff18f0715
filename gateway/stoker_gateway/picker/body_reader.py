"""Reading bodies without stopping for them: small ones at once, large ones in a process of their own, one by one.

A parser holds Python's lock, so a thread would not do: 20 MB of JSON take from a tenth of a second to several, and
hundreds of megabytes, by what somebody wrote there. If the process dies of a body, that request is answered so, and
the next large one gets another. It ends when its input does, hence with the picker, however that ends.

    to it:    bytes of the path, bytes of the body (each 8 bytes), path, body
    from it:  bytes of the result (8 bytes), result as JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any, BinaryIO, Final

import orjson

from stoker_engine.contract.errors import RequestError
from stoker_gateway.picker.errors import UnavailableError
from stoker_gateway.picker.request import ModelRequest, read_request

logger = logging.getLogger(__name__)

#: Bytes of the largest body that is read at once: at worst some 10 ms.
AT_ONCE: Final = 128 * 1024
#: For how many seconds a body may be read.
LONGEST_S: Final = 30.0

_SIZES: Final = struct.Struct("!QQ")
_SIZE: Final = struct.Struct("!Q")
_PIECE: Final = 256 * 1024


class BodyReader:
    """Reads bodies, from one event loop.

    Args:
        at_once: bytes of the largest body for which no other process is asked.
        longest_s: for how many seconds that process may read one.
    """

    def __init__(self, at_once: int = AT_ONCE, longest_s: float = LONGEST_S) -> None:
        self._at_once = at_once
        #: As given.
        self.longest_s = longest_s
        self._process: Process | None = None
        self._free = asyncio.Lock()

    async def read(self, path: str, body: bytes) -> ModelRequest:
        """What `read_request` says.

        Raises:
            RequestError: likewise, or the body could not be read here.
        """
        if len(body) <= self._at_once:
            return read_request(path, body)
        await self._free.acquire()
        # Who stops waiting does not stop the reading: what the process says next would be taken for another's.
        reading = asyncio.create_task(self._read_elsewhere(path, body))
        reading.add_done_callback(self._done)
        result = await asyncio.shield(reading)
        if "error" in result:
            raise RequestError(**result["error"])
        return ModelRequest(**result | {"chain": [bytes.fromhex(each) for each in result["chain"]]})

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _done(self, reading: asyncio.Task[dict[str, Any]]) -> None:
        self._free.release()
        if not reading.cancelled():
            reading.exception()  # somebody has looked, also where nobody waits any more

    async def _read_elsewhere(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.longest_s):
                return await self._exchange(path.encode(), body)
        except (OSError, EOFError, TimeoutError) as error:
            logger.warning("a body of %d bytes could not be read: %s", len(body), error or type(error).__name__)
            await self.close()
            raise UnavailableError("the request body could not be read at this time; try again") from error

    async def _exchange(self, path: bytes, body: bytes) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            # -P: nothing is imported from wherever the gateway was started.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", __name__, stdin=PIPE, stdout=PIPE
            )
        to, back = self._process.stdin, self._process.stdout
        assert to is not None and back is not None
        to.write(_SIZES.pack(len(path), len(body)) + path)
        for start in range(0, len(body), _PIECE):
            to.write(memoryview(body)[start : start + _PIECE])
            await to.drain()
        (size,) = _SIZE.unpack(await back.readexactly(_SIZE.size))
        result: dict[str, Any] = orjson.loads(await back.readexactly(size))
        return result


def read_on(requests: BinaryIO, results: BinaryIO) -> None:
    """Reads bodies until there are no more."""
    while len(head := requests.read(_SIZES.size)) == _SIZES.size:
        path_size, body_size = _SIZES.unpack(head)
        path, body = requests.read(path_size), requests.read(body_size)
        if len(path) + len(body) < path_size + body_size:
            return  # the picker has ended
        result = orjson.dumps(_read(path.decode(), body))
        results.write(_SIZE.pack(len(result)) + result)
        results.flush()


def _read(path: str, body: bytes) -> dict[str, Any]:
    try:
        request = read_request(path, body)
    except RequestError as error:
        return {"error": {"message": error.message, "param": error.param, "code": error.code}}
    fields = {each.name: getattr(request, each.name) for each in dataclasses.fields(request)}
    return fields | {"chain": [each.hex() for each in request.chain]}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the picker too, which ends this
    gc.disable()  # what is read has no cycles, and looking for them would take most of the time
    read_on(sys.stdin.buffer, sys.stdout.buffer)
