"""An engine process that dies at scripted points. Run as ``crashing_engine.py DEATHS …``, with `main`'s arguments.

Real: the process's main loop, scheduler, KV manager, pipe. Faked: the model; torch is not imported, so that a start
takes a fraction of a second. DEATHS is a folder with a file per point of a life; each line is a way to die there, once.
A process that reaches the point takes the first line, and dies like that. A file ``POINT-ENGINE`` is for one of several
engines of the model:

    start   before anything is received              N          by signal N (19: it is only stopped)
    load    while the model is loaded                raise      by an exception of its own
    take    with a request, before its first step    memory     by a MemoryError
    step    in a step, before any token is sent      exit       without a message
    token   in the 20th step from now                hang       does not die, but hangs
                                                     argument   by what loading may raise
    send    with half of a message in the pipe       unpicklable, junk   with outputs that cannot be sent, or read

    adapter   while an adapter is loaded

An adapter's path is a file of DEATHS, or ``FILE-ENGINE`` if that exists. Its text is the digest; or `wrong: ERROR`; or
`wait`, until the text changes. Tokens of requests with an adapter are odd.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from stoker_common.errors import AdapterError, ArgumentError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.outputs import StepOutputs
from stoker_engine.core.step import Sampled, Step, StepResult
from stoker_engine.sizing.cache_groups import CacheGroup

DEATHS, ENGINE = Path(sys.argv[1]), sys.argv[-2]
BLOCKS, VOCABULARY = 256, 300


class Junk:
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return _junk, (0,)


def _junk(_: int) -> NoReturn:
    raise OSError("junk")


def planned(point: str) -> Path | None:
    """Return the file with the deaths at that point, or None."""
    files = (DEATHS / point, DEATHS / f"{point}-{ENGINE}")
    return next((file for file in files if file.exists()), None)


def come_to(point: str) -> str | None:
    """Die, if a death is planned here; return ways to die that the caller must carry out."""
    file = planned(point)
    if file is None:
        return None
    how, _, later_points = file.read_text().partition("\n")
    file.write_text(later_points) if later_points else file.unlink()
    if how.isdigit():
        os.kill(os.getpid(), int(how))
        return None
    match how:
        case "raise":
            raise ValueError("a planned death")
        case "memory":
            raise MemoryError
        case "argument":
            raise ArgumentError("--dtype", "a planned refusal; choose another")
        case "exit":
            os._exit(3)
        case "hang":
            signal.pause()
    return how


class Adapters:
    """Adapters whose content is given by files."""

    def __init__(self) -> None:
        self.in_slots: dict[int, int] = {}
        self._loaded: set[int] = set()

    def load(self, source: AdapterSource) -> LoadedAdapter:
        file = DEATHS / f"{source.path}-{ENGINE}"
        file = file if file.exists() else DEATHS / source.path
        while (text := file.read_text() if file.exists() else "wrong: no such file") == "wait":
            time.sleep(0.001)  # sleeps: reading until a test lets it end
        come_to("adapter")
        if text.startswith("wrong: "):
            raise AdapterError(text.removeprefix("wrong: "))
        self._loaded.add(source.number)
        return LoadedAdapter(text, 8, 100, 0.5)

    def drop(self, number: int) -> None:
        self._loaded.remove(number)
        with (DEATHS / "dropped").open("a") as dropped:
            dropped.write(f"{number} ")

    def activate(self, slot: int, number: int) -> None:
        assert number in self._loaded
        self.in_slots[slot] = number


class Runner:
    """Each token is a function of the previous one."""

    def __init__(self, *_: object, **options: object) -> None:
        come_to("load")
        self.plan = types.SimpleNamespace(
            num_blocks=BLOCKS,
            block_size=16,
            groups=(CacheGroup(None, (0,), 1),),
            step_tokens=512,
            max_model_len=512,
            max_num_seqs=256,
        )
        self.device = types.SimpleNamespace(type="cpu")
        self.grammars = types.SimpleNamespace(set_token_table=lambda table: None)
        self.adapters = Adapters()
        self._slots: dict[int, int] = {}  # by row
        self._steps_left = -1
        self._known: dict[int, list[int]] = {}  # by row
        self._results: list[StepResult] = []
        self.runs_ahead = False

    def launch(self, step: Step) -> None:
        self._results.append(self.run(step))

    def collect(self) -> StepResult:
        return self._results.pop(0)

    def discard_in_flight(self) -> None:
        self._results.clear()

    def run(self, step: Step) -> StepResult:
        time.sleep(0.001)  # sleeps: a step takes time
        come_to("step")
        if planned("token") is not None and self._steps_left < 0:
            self._steps_left = 20
        self._steps_left -= 1
        if self._steps_left == 0:
            come_to("token")
        for slot, number in step.adapters:
            self.adapters.activate(slot, number)
        for fork in step.forks:
            self._slots[fork.row] = self._slots[fork.parent]
            self._known[fork.row] = self._known[fork.parent][: fork.num_tokens]
        for new in step.new:
            self._slots[new.row] = new.adapter_slot
            assert (new.adapter_slot < 0) == (new.spec.adapter < 0)
            assert new.adapter_slot < 0 or self.adapters.in_slots[new.adapter_slot] == new.spec.adapter
            self._known[new.row] = [*new.spec.prompt_token_ids, *new.output_token_ids]
        for row, position, token_ids in step.written:
            self._known[row][position:] = token_ids
        sampled = []
        for row, start, length, num_samples in zip(step.rows, step.starts, step.lengths, step.num_samples, strict=True):
            if num_samples:
                known = self._known[row]
                token = 5 + (known[start + length - 1] * 7 + start + length) % 250
                token = token // 2 * 2 + (self._slots[row] >= 0)
                known[start + length :] = [token]
                sampled.append(Sampled([[token]] * num_samples))
        return StepResult(sampled)


def _fake_module(name: str, **contents: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


card = types.SimpleNamespace(licence=None, title=None)
config = types.SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=(1,))
checkpoint = types.SimpleNamespace(path=Path("/nowhere"), config=config, card=card, method="")
stored = types.SimpleNamespace(dtype="float32", weights="float32", kv_cache_dtype="float32")
_fake_module("stoker_engine.exec.dtypes", stored_as=lambda *_: stored)
_fake_module("stoker_engine.exec.check_sharding", refuse_indivisible=lambda *_: None)
_fake_module("stoker_engine.exec.runner", Runner=Runner)
_fake_module("stoker_engine.exec.build_runner", build_runner=Runner)
_fake_module("stoker_engine.exec.check_sharding", refuse_indivisible=lambda *_: None)
_fake_module("stoker_engine.models.checkpoint", Checkpoint=object, find_checkpoint=lambda _: checkpoint)

from stoker_engine.engine import Engine  # noqa: E402
from stoker_engine.processes import main as process  # noqa: E402

add, send = Engine.add, Connection.send


def crashing_add(self: Engine, request: Any) -> None:
    try:
        come_to("take")
    except Exception as error:  # `main` survives errors of a single request
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    add(self, request)


def crashing_send(self: Connection, message: Any) -> None:
    if isinstance(message, StepOutputs) and message.deltas and (file := planned("send")) is not None:
        if file.read_text().split()[0] not in ("unpicklable", "junk"):
            whole = pickle.dumps(message)
            os.write(self.fileno(), len(whole).to_bytes(4, "big") + whole[: len(whole) // 2])
        match come_to("send"):
            case "unpicklable":
                message = StepOutputs([lambda: None], None)
            case "junk":
                message = Junk()
    send(self, message)


Engine.add = crashing_add  # type: ignore[method-assign]
Connection.send = crashing_send  # type: ignore[method-assign]

if __name__ == "__main__":
    come_to("start")
    code = process.main(sys.argv[2:])
    os._exit(code)
