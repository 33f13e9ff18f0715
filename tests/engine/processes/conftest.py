"""Real engine processes on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.processes.engine_process import PROGRAM

#: Runs the engine process with `Engine.step` replaced by `{body}`, a function's body; `step` is the real one.
_WITH_STEP = """
import itertools, sys, time
from stoker_engine.engine import Engine
from stoker_engine.processes.main import main
step, count = Engine.step, itertools.count()
def changed(self):
    {body}
    return step(self)
Engine.step = changed
sys.exit(main(sys.argv[1:]))
"""

MakeLLM = Callable[..., AsyncLLM]


@pytest.fixture
def make_llm(tiny_llama: Path) -> Iterator[MakeLLM]:
    """Create clients that are not loaded yet; they are shut down at the end."""
    made: list[AsyncLLM] = []

    def make(model: str | None = None, step: str | None = None, **options: float) -> AsyncLLM:
        program = PROGRAM if step is None else ("-c", _WITH_STEP.format(body=step))
        args = EngineArgs(model or str(tiny_llama), num_gpu_blocks_override=512)
        made.append(AsyncLLM(args, program=program, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
