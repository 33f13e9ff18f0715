"""Simulated machines: each has its own network, mounts (and /dev/shm), IPC and processes; only TCP connects them.

    machine 0: bridge, 10.177.N.1 ─┬─ machine 1: eth0, 10.177.N.2
                                   └─ machine 2: eth0, 10.177.N.3

Their IPv6 addresses are fd00:177::1, ::2, ::3.

They are Linux namespaces, created with unshare(1) and ip(8), which requires root. All processes of a machine end with
its first one, and that ends with the test's process.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ...support.waiting import until

_NUMBERS = itertools.count(os.getpid() % 200)


def cannot() -> str:
    """Return why machines cannot be created; empty if they can."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "-n", "-m", "-i", "-p", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """A machine, initially without a network.

    Attributes:
        address: address in the machines' network.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        # `cat` is the machine's first process; it ends when this process closes its standard input.
        self._first = subprocess.Popen(
            ["unshare", "-n", "-m", "-i", "-p", "--fork", "--mount-proc", "--kill-child", "cat"], stdin=subprocess.PIPE
        )
        children = until(psutil.Process(self._first.pid).children, "a machine starts")
        self.pid = children[0].pid
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.run("ip", "link", "set", "lo", "up")

    def enter(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this machine."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-i", "-p", "--", *words]

    def run(self, *words: str) -> str:
        """Run a command; return its output."""
        return subprocess.run(self.enter(*words), check=True, capture_output=True, text=True, timeout=60).stdout

    def start(self, *words: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a Python program in the background; its output goes to `log`."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.enter(sys.executable, *words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return this machine's processes with all `words` in their command lines, by their pids outside of it."""
        found = []
        pid_namespace = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == pid_namespace and all(
                    word in line for word in words
                ):
                    found.append(process)
            except (OSError, psutil.Error):
                continue  # it has ended
        return found

    def close(self) -> None:
        """End all processes of the machine."""
        assert self._first.stdin is not None
        self._first.stdin.close()
        self._first.wait(120)


class Machines:
    """Machines in one network; the first has the bridge."""

    def __init__(self, count: int) -> None:
        self._number = next(_NUMBERS) % 250
        self.all = [Machine(f"10.177.{self._number}.{1 + index}") for index in range(count)]
        first = self.all[0]
        first.run("ip", "link", "add", "bridge", "type", "bridge")
        first.run("ip", "addr", "add", f"{first.address}/24", "dev", "bridge")
        first.run("ip", "addr", "add", "fd00:177::1/64", "dev", "bridge", "nodad")
        first.run("ip", "link", "set", "bridge", "up")
        for index, machine in enumerate(self.all[1:], 1):
            outer_link, inner_link = (
                ("name", f"port{index}", "netns", str(first.pid)),
                ("name", "eth0", "netns", str(machine.pid)),
            )
            subprocess.run(["ip", "link", "add", *outer_link, "type", "veth", "peer", *inner_link], check=True)
            first.run("ip", "link", "set", f"port{index}", "master", "bridge", "up")
            machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", "eth0")
            machine.run("ip", "addr", "add", f"fd00:177::{1 + index}/64", "dev", "eth0", "nodad")
            machine.run("ip", "link", "set", "eth0", "up")

    def __getitem__(self, index: int) -> Machine:
        return self.all[index]

    def cut(self, index: int) -> None:
        """Disconnect a machine."""
        self.all[0].run("ip", "link", "set", f"port{index}", "down")

    def fix(self, index: int) -> None:
        """Reconnect a machine."""
        self.all[0].run("ip", "link", "set", f"port{index}", "up")


@contextmanager
def machines(count: int) -> Iterator[Machines]:
    """Run some machines during the block."""
    made: Any = None
    try:
        made = Machines(count)
        yield made
    finally:
        for machine in made.all if made is not None else []:
            machine.close()
