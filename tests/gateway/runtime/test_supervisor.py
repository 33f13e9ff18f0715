"""The gateway's main process: signals to the picker."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from asyncio import unix_events
from pathlib import Path
from typing import Any

import pytest

from stoker_gateway.registry.model_registry import ModelRegistry
from stoker_gateway.runtime.supervisor import _Supervisor
from stoker_gateway.settings import GatewaySettings

from ...support.waiting import HANGING_S, until


def test_signal_to_a_dead_picker_keeps_its_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio reports exit status 255 if other code has waited for the process."""
    may_wait = threading.Event()

    class LateOs:
        """The module `os` for asyncio, which waits for the picker only after the signal."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def waitpid(self, pid: int, options: int) -> tuple[int, int]:
            assert may_wait.wait(HANGING_S)
            return os.waitpid(pid, options)

    async def main() -> None:
        monkeypatch.setattr(unix_events, "os", LateOs())
        supervisor = _Supervisor(GatewaySettings("127.0.0.1", 0), tmp_path, ModelRegistry(), ())
        supervisor._picker = picker = await asyncio.create_subprocess_exec("sleep", "600")
        os.kill(picker.pid, signal.SIGKILL)
        until(lambda: Path(f"/proc/{picker.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        supervisor._signalled()
        may_wait.set()
        assert await picker.wait() == -signal.SIGKILL

    asyncio.run(main())
