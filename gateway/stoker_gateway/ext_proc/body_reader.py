"""Parsing of request bodies without long delays of the event loop: small ones directly, others in a subprocess.

The subprocess parses one body at a time. The JSON parser holds the GIL, so a thread does not help: 30 MB of JSON take
0.1 to 2 seconds, depending on their content. Owners take turns, so an owner with many bodies delays another by a single
body. The subprocess's CPU time for a body is limited; beyond it the error is not retryable, because a retry would take
as long. If the client disconnects while its body is parsed, or the subprocess fails, a new subprocess parses the next
body. The subprocess exits when its standard input is closed, hence also when the picker is killed.

    request:   size of the head, size of the body (8 bytes each), head (path and Content-Type as JSON), body
    response:  size of the result (8 bytes), result as JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import math
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any, BinaryIO, Final, NoReturn

import orjson

from stoker_common.errors import RequestError
from stoker_gateway.ext_proc.errors import TooLargeError, UnavailableError
from stoker_gateway.ext_proc.request import ModelRequest, read_request
from stoker_gateway.scheduling.fair_queue import FairQueue

logger = logging.getLogger(__name__)

#: Limits of a body that is parsed in the event loop: its bytes, its opening braces and brackets, and its commas. Such a
#: body takes up to about 10 ms.
AT_ONCE: Final = 128 * 1024
_AT_ONCE_PARTS: Final = 2048
_AT_ONCE_COMMAS: Final = 16_384
#: Maximum CPU time of a body, in seconds.
MAX_CPU_S: Final = 5.0
#: Maximum time that a body waits for its turn, and maximum time of parsing, in seconds. The sum is less than Envoy's
#: message timeout.
WAIT_S: Final = 6.0
LONGEST_S: Final = 8.0
#: Maximum number of waiting bodies. Beyond it, the newest body of the owner with the most bodies is rejected.
_MAX_WAITING: Final = 1024

_SIZES: Final = struct.Struct("!QQ")
_SIZE: Final = struct.Struct("!Q")
_PIECE: Final = 256 * 1024


class BodyReader:
    """Parses request bodies. Used from one event loop.

    Args:
        at_once: maximum size of a body that is parsed in the event loop, in bytes.
        longest_s: maximum time that the subprocess may take for one body, in seconds.
        wait_s: maximum time that a body waits for its turn, in seconds.
    """

    def __init__(self, at_once: int = AT_ONCE, longest_s: float = LONGEST_S, wait_s: float = WAIT_S) -> None:
        self._at_once = at_once
        self.longest_s = longest_s
        self._wait_s = wait_s
        self._process: Process | None = None
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(_MAX_WAITING, math.inf)
        self._current: asyncio.Future[None] | None = None

    async def read(self, path: str, body: bytes, content_type: str = "", owner: str = "") -> ModelRequest:
        """Parse a body; see `read_request`.

        Args:
            owner: owner of the request; owners take turns.

        Raises:
            RequestError: the body is invalid, or could not be parsed.
        """
        if self._is_small(body):
            return read_request(path, body, content_type)
        async with self._process_for(owner):
            result = await self._read_elsewhere(orjson.dumps([path, content_type]), body)
        if "error" in result:
            raise (TooLargeError if result["too_large"] else RequestError)(**result["error"])
        return ModelRequest(**result | {"chain": [bytes.fromhex(each) for each in result["chain"]]})

    @property
    def pid(self) -> int | None:
        """Process id of the subprocess, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def num_waiting(self) -> int:
        """Number of waiting bodies."""
        return len(self._waiting)

    async def close(self) -> None:
        """End the subprocess, if it runs."""
        process = self._kill()
        if process is not None:
            await process.wait()

    def _is_small(self, body: bytes) -> bool:
        return (
            len(body) <= self._at_once
            and body.count(b"{") + body.count(b"[") <= _AT_ONCE_PARTS
            and body.count(b",") <= _AT_ONCE_COMMAS
        )

    @contextlib.asynccontextmanager
    async def _process_for(self, owner: str) -> AsyncIterator[None]:
        """Reserve the subprocess for one body.

        Raises:
            UnavailableError: the body's turn did not come in time, or too many bodies wait.
        """
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        if (displaced := self._waiting.push(owner, 0, granted, loop.time())) is not None:
            displaced.cancel()
        self._grant_next()
        try:
            await asyncio.wait((granted,), timeout=self._wait_s)
            if granted.cancelled() or not granted.done():
                raise UnavailableError("the gateway is busy with other large request bodies; try again")
            yield
        finally:
            granted.cancel()
            self._waiting.remove(granted)
            if self._current is granted:
                self._current = None
                self._grant_next()

    def _grant_next(self) -> None:
        if self._current is None:
            now = asyncio.get_running_loop().time()
            self._current = self._waiting.pop(now, lambda waiting: not waiting.done())
            if self._current is not None:
                self._current.set_result(None)

    async def _read_elsewhere(self, head: bytes, body: bytes) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.longest_s):
                return await self._exchange(head, body)
        except (OSError, EOFError, TimeoutError) as error:
            logger.warning(
                "a request body of %d bytes could not be parsed: %s", len(body), error or type(error).__name__
            )
            self._kill()
            raise UnavailableError("the gateway failed to parse the request body; try again") from error
        except BaseException:  # for example a disconnect: the pending result must not become the next body's
            self._kill()
            raise

    def _kill(self) -> Process | None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return process

    async def _exchange(self, head: bytes, body: bytes) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            # -P: imports nothing from the working directory.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", __name__, stdin=PIPE, stdout=PIPE
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(_SIZES.pack(len(head), len(body)) + head)
        for start in range(0, len(body), _PIECE):
            stdin.write(memoryview(body)[start : start + _PIECE])
            await stdin.drain()
        (size,) = _SIZE.unpack(await stdout.readexactly(_SIZE.size))
        result: dict[str, Any] = orjson.loads(await stdout.readexactly(size))
        return result


def read_on(requests: BinaryIO, results: BinaryIO) -> None:
    """Parse bodies until the input ends."""
    while len(sizes := requests.read(_SIZES.size)) == _SIZES.size:
        head_size, body_size = _SIZES.unpack(sizes)
        head, body = requests.read(head_size), requests.read(body_size)
        if len(head) + len(body) < head_size + body_size:
            return  # the picker has ended
        path, content_type = orjson.loads(head)
        result = orjson.dumps(_read(path, body, content_type))
        results.write(_SIZE.pack(len(result)) + result)
        results.flush()


def _read(path: str, body: bytes, content_type: str = "") -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        request = read_request(path, body, content_type)
    except RequestError as error:
        error_fields = {"message": error.message, "param": error.param, "code": error.code}
        return {"error": error_fields, "too_large": isinstance(error, TooLargeError)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    fields = {each.name: getattr(request, each.name) for each in dataclasses.fields(request)}
    return fields | {"chain": [each.hex() for each in request.chain]}


def _too_long(*_: object) -> NoReturn:
    raise TooLargeError("the request body takes too long to parse; send a smaller one, or fewer objects and lists")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the picker ends this process, even if both get SIGINT
    signal.signal(signal.SIGPROF, _too_long)
    gc.disable()  # parsed JSON has no cycles, and looking for them would take most of the time
    read_on(sys.stdin.buffer, sys.stdout.buffer)
