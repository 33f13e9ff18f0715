"""Data-parallel engines behave like one model: the same outputs in the same order, and no process is left.

Nothing is faked: engine processes on a tiny model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stoker_common.errors import ArgumentError, EngineDeadError, ModelError, RequestError
from stoker_engine import LLM, SamplingParams, StructuredOutputs
from stoker_engine.processes.dp_engines import DPEngines

from ..server.conftest import wait_until

PROMPTS = [[5, 6, 7 + i % 3, *range(3, 3 + 9 * (i % 5))] for i in range(11)]


def _pids(llm: LLM) -> list[int]:
    assert isinstance(llm.engine, DPEngines)
    return [process.pid for process in llm.engine._processes]


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_outputs_equal_those_of_one_engine(tiny_llama: Path) -> None:
    """Greedy, seeded, several sequences, stop strings, grammars, refusals; then an engine is killed."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    variants = [
        greedy,
        replace(greedy, n=2, temperature=1.0, seed=5),
        replace(greedy, structured_outputs=StructuredOutputs(choice=["yes", "no"]), ignore_eos=False),
        replace(greedy, prompt_logprobs=1),
    ]
    params = [variants[i % len(variants)] for i in range(len(PROMPTS))]
    alone = LLM(str(tiny_llama), num_gpu_blocks_override=256)
    expected = alone.generate(PROMPTS, params, use_tqdm=False)
    stop = replace(greedy, stop=[expected[0].outputs[0].text[2:4]])
    with LLM(str(tiny_llama), num_gpu_blocks_override=256, data_parallel_size=2) as llm:
        pids = _pids(llm)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == PROMPTS
        for ours, theirs in zip(outputs, expected, strict=True):
            assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
            assert [c.text for c in ours.outputs] == [c.text for c in theirs.outputs]
            assert [c.finish_reason for c in ours.outputs] == [c.finish_reason for c in theirs.outputs]
            for mine, their_completion in zip(ours.outputs, theirs.outputs, strict=True):
                assert mine.cumulative_logprob == pytest.approx(their_completion.cumulative_logprob, abs=1e-4)
        assert (
            llm.generate(PROMPTS[0], stop, use_tqdm=False)[0].outputs[0].text
            == alone.generate(PROMPTS[0], stop, use_tqdm=False)[0].outputs[0].text
        )
        with pytest.raises(RequestError):
            llm.generate([PROMPTS[0], [10**6]], greedy, use_tqdm=False)
        assert not llm.engine.has_work
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"engine 1 \(of 2\) died"):
            llm.generate(PROMPTS, replace(greedy, max_tokens=100), use_tqdm=False)
        with pytest.raises(EngineDeadError):
            llm.generate(PROMPTS[0], greedy, use_tqdm=False)
    assert not any(map(_lives, pids))


def test_a_stopped_engine_ends_its_requests(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), num_gpu_blocks_override=256, data_parallel_size=2) as llm:
        pids = _pids(llm)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"engine 1 \(of 2\) died: it was stopped for 3 s"):
            llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert not any(map(_lives, pids))


@pytest.mark.slow
def test_an_engine_stopped_while_loading_ends_the_load(tiny_llama: Path) -> None:
    before = _children()

    def programs() -> set[str]:
        """Return the pids of engine programs; a child counts only after exec, until which it is a fork."""
        started = _children() - before
        return {pid for pid in started if b"stoker_engine.processes" in Path(f"/proc/{pid}/cmdline").read_bytes()}

    def stop_one() -> None:
        wait_until(lambda: len(programs()) == 2)
        os.kill(int(max(programs())), signal.SIGSTOP)

    stopping = threading.Thread(target=stop_one)
    stopping.start()
    with pytest.raises(EngineDeadError, match="died while it loaded: it was stopped"):
        LLM(str(tiny_llama), num_gpu_blocks_override=256, data_parallel_size=2)
    stopping.join()
    assert _children() == before


@pytest.mark.slow
def test_engines_may_have_ranks(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(
        str(tiny_llama), device="cpu", num_gpu_blocks_override=64, tensor_parallel_size=2, data_parallel_size=2
    ) as llm:
        assert [len(each.outputs[0].token_ids) for each in llm.generate([[5], [6], [7]], params)] == [4, 4, 4]


def test_a_failed_load_leaves_no_process(tiny_llama: Path) -> None:
    before = _children()
    with pytest.raises(ModelError, match="does not fit"):
        LLM(str(tiny_llama), data_parallel_size=2, gpu_memory_utilization=1e-9)
    assert _children() == before
    with pytest.raises(ArgumentError, match="enable-expert-parallel"):
        LLM(str(tiny_llama), data_parallel_size=2, enable_expert_parallel=True)


_SCRIPT = """
import signal, sys
from stoker_engine import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and its children, ignore it
llm = LLM(sys.argv[1], data_parallel_size=2, num_gpu_blocks_override=256)
print(*(process.pid for process in llm.engine._processes), flush=True)
if sys.argv[2] == "run":
    llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    while True:
        llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["by itself", "SIGINT", "SIGKILL"])
def test_no_process_is_left_however_the_script_ends(tiny_llama: Path, end: str) -> None:
    words = [sys.executable, "-c", _SCRIPT, str(tiny_llama), "end" if end == "by itself" else "run"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as script:
        assert script.stdout is not None
        pids = [int(word) for word in script.stdout.readline().split()]
        assert len(pids) == 2
        if end != "by itself":
            time.sleep(0.5)  # sleeps: moment of the death, during steps
            script.send_signal(getattr(signal, end))
        try:
            code = script.wait(60)
        finally:
            script.kill()  # must not keep running during other tests
    assert (code == 0) == (end == "by itself")
    wait_until(lambda: not any(map(_lives, pids)))


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
