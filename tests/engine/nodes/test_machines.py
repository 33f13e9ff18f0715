"""A model on several machines gives the results of one machine; dead, disconnected or leaving machines are survived or
reported.

Nothing is faked, on machines that share only a network (`machines`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker_engine import LLM, SamplingParams

from ...support.processes import command_line, lives
from ...support.waiting import until
from .machines import Machine, Machines, cannot, machines

pytestmark = pytest.mark.skipif(bool(why := cannot()), reason=why)

KEY = {"STOKER_NODE_KEY": "a key of the tests"}
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64}
PROMPTS = [[5, 6, 7], [9] * 40, [3, 1, 4, 1, 5, 9, 2, 6]]
BODY = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "return_token_ids": True}

OFFLINE = """
import json, sys
from stoker_engine import LLM, SamplingParams
model, options, prompts = json.loads(sys.argv[1])
llm = LLM(model, **options)
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=1), use_tqdm=False)
print(json.dumps([[output.outputs[0].token_ids, output.outputs[0].cumulative_logprob] for output in outputs]))
"""
ASK = """
import json, sys, urllib.request
body = json.loads(sys.argv[2]) if len(sys.argv) > 2 else None
request = urllib.request.Request(sys.argv[1], body and json.dumps(body).encode(), {"content-type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=60) as response:
        print(json.dumps([response.status, response.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


def _flags(head: Machine, number: int, **options: Any) -> dict[str, Any]:
    return {"nnodes": 2, "node_rank": number, "master_addr": head.address, **OPTIONS, **options}


def _words(flags: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


class Served:
    """``stoker serve`` on two machines."""

    def __init__(self, made: Machines, model: Path, folder: Path, step_timeout: float = 300, **options: Any) -> None:
        self.machines, self._model, self._folder, self._options = made, model, folder, options
        words = "--host=127.0.0.1", "--port=8000", "--max-engine-restarts=9", f"--step-timeout={step_timeout}"
        self.server = self._start(0, *words)
        self.agent = self.start_agent()

    def start_agent(self) -> subprocess.Popen[bytes]:
        self.agent = self._start(1, "--headless")
        return self.agent

    def log(self, number: int) -> str:
        return (self._folder / f"log-{number}").read_text()

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        words = [f"http://127.0.0.1:8000{path}", *([] if body is None else [json.dumps(body)])]
        status, text = json.loads(self.machines[0].run(sys.executable, "-I", "-S", "-c", ASK, *words))
        return status, text

    def is_ready(self) -> bool:
        return self.ask("/ready")[0] == 200

    def wait_ready(self) -> None:
        until(self.is_ready, lambda: f"the server serves:\n{self.log(0)}\n{self.log(1)}")

    def complete(self) -> list[int]:
        status, text = self.ask("/v1/completions", BODY)
        assert status == 200, text
        return list(json.loads(text)["choices"][0]["token_ids"])

    def wait_log(self, words: str, number: int = 0) -> None:
        until(lambda: words in self.log(number), lambda: f"{words!r} in\n{self.log(number)}")

    def process(self, number: int, *words: str) -> psutil.Process:
        (found,) = self.machines[number].processes(*words)
        return found

    def _start(self, number: int, *words: str) -> subprocess.Popen[bytes]:
        flags = _flags(self.machines[0], number, tensor_parallel_size=2, served_model_name="tiny", **self._options)
        program = ("-P", "-m", "stoker", "serve", str(self._model), *words, *_words(flags))
        return self.machines[number].start(*program, log=self._folder / f"log-{number}", **KEY)


@pytest.fixture
def two() -> Iterator[Machines]:
    with machines(2) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> list[tuple[list[int], float]]:
    outputs = LLM(str(tiny_llama), **OPTIONS).generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=12, logprobs=1), use_tqdm=False
    )
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob or 0.0) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "master_addr": "fd00:177::1"}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_model_on_two_machines_gives_the_outputs_of_one(
    options: dict[str, Any], two: Machines, tiny_llama: Path, alone: list[tuple[list[int], float]], tmp_path: Path
) -> None:
    head_flags, node_flags = _flags(two[0], 0, **options), _flags(two[0], 1, **options)
    agent = two[1].start(
        *("-P", "-m", "stoker", "serve", str(tiny_llama), "--headless"), *_words(node_flags), log=tmp_path / "1", **KEY
    )
    head = two[0].start("-c", OFFLINE, json.dumps([str(tiny_llama), head_flags, PROMPTS]), log=tmp_path / "0", **KEY)
    assert head.wait(240) == 0, (tmp_path / "0").read_text() + (tmp_path / "1").read_text()
    found = json.loads((tmp_path / "0").read_text().strip("\n").split("\n")[-1])
    for (ours, our_logprob), (theirs, their_logprob) in zip(found, alone, strict=True):
        assert ours == theirs
        assert abs(our_logprob - their_logprob) < 1e-3
    assert agent.wait(60) == 0, (tmp_path / "1").read_text()
    assert not two[1].processes("stoker_engine.exec.rank_main")


@pytest.mark.slow(drawn=False)  # the test with two engines covers more
def test_two_machines_recover_from_each_failure(
    two: Machines, tiny_llama: Path, alone: list[tuple[list[int], float]], tmp_path: Path
) -> None:
    """A rank is killed, then an agent, then the network is cut: each time the cause is reported and service resumes."""
    served = Served(two, tiny_llama, tmp_path)
    served.wait_ready()
    assert served.complete() == alone[0][0]

    rank = served.process(1, "stoker_engine.exec.rank_main")
    rank.kill()
    served.wait_log("rank 1 of 2 on node 1 (" + two[1].address + ") was killed by signal 9")
    served.wait_ready()
    assert served.complete() == alone[0][0]

    rank = served.process(1, "stoker_engine.exec.rank_main")
    served.process(1, "--headless").kill()
    served.wait_log("is gone with its node: its `stoker serve … --headless` has ended")
    until(lambda: not lives(rank), lambda: "the rank ends with its agent")
    served.start_agent()
    served.wait_ready()
    assert served.complete() == alone[0][0]

    rank = served.process(1, "stoker_engine.exec.rank_main")
    two.cut(1)
    served.wait_log("is gone with its node: it did not respond for 4 s")
    until(lambda: not lives(rank), lambda: "the rank ends with its head")
    assert not served.is_ready()
    two.fix(1)
    served.wait_ready()
    assert served.complete() == alone[0][0]

    os.kill(served.process(0, "--port=8000").pid, signal.SIGTERM)
    assert served.server.wait(60) == 0
    assert served.agent.wait(60) == 0, served.log(1)
    for number in (0, 1):
        assert not two[number].processes("stoker_engine.exec.rank_main")


@pytest.mark.slow
def test_the_node_ends_after_the_head_is_killed(two: Machines, tiny_llama: Path, tmp_path: Path) -> None:
    served = Served(two, tiny_llama, tmp_path, distributed_timeout_seconds=60)
    served.wait_ready()
    rank = served.process(1, "stoker_engine.exec.rank_main")
    served.process(0, "--port=8000").kill()
    until(lambda: not lives(rank), lambda: "the rank ends with its head")
    assert served.agent.wait(180) == 1
    assert "could not be reached for 6" in served.log(1)


@pytest.mark.slow
def test_a_stopped_rank_ends_the_server_and_sigterm_ends_the_node(
    two: Machines, tiny_llama: Path, tmp_path: Path
) -> None:
    served = Served(two, tiny_llama, tmp_path)
    served.wait_ready()
    served.process(1, "stoker_engine.exec.rank_main").suspend()
    status, _ = served.ask("/v1/completions", {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12})
    assert status in (500, 503)  # ranks are looked at without requests too
    served.wait_log("rank 1 of 2 on node 1 (" + two[1].address + ") was stopped")
    assert served.server.wait(120) == 1  # a stuck engine is not restarted: its machine may be faulty
    os.kill(served.process(1, "--headless").pid, signal.SIGTERM)
    assert served.agent.wait(60) == 0
    assert not two[1].processes("stoker_engine.exec.rank_main")


@pytest.mark.slow
def test_one_engine_serves_while_the_other_recovers_on_its_machine(
    two: Machines, tiny_llama: Path, alone: list[tuple[list[int], float]], tmp_path: Path
) -> None:
    """Engine 1's ranks are on node 1.

    Whatever happens to engine 1, its agent or its network, engine 0 serves, the cause is reported, and finally both
    serve.
    """
    served = Served(two, tiny_llama, tmp_path, data_parallel_size=2, step_timeout=20)
    other_engine, rank_main = "engine 1 (of 2)", "stoker_engine.exec.rank_main"

    def both_serve() -> bool:
        return served.ask("/health")[1].count(": serving") == 2

    def serves_after(cause: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        served.wait_log(f"{other_engine} died: {cause}")
        assert served.complete() == alone[0][0]
        meanwhile()
        all_have_ended()
        until(both_serve, lambda: f"both engines serve again:\n{served.log(0)}\n{served.log(1)}")
        assert served.complete() == alone[0][0]
        (tmp_path / "log-0").write_bytes(b"")

    def all_have_ended() -> None:
        until(lambda: not any(map(lives, ranks)), lambda: "the ranks end with their engine")

    def is_reported_missing() -> None:
        until(lambda: "waiting for node 1 of 2 at" in served.ask("/health")[1], lambda: served.ask("/health")[1])
        assert served.is_ready()
        assert served.complete() == alone[0][0]

    def ranks_of_node_1() -> list[psutil.Process]:
        found = served.machines[1].processes(rank_main)
        assert len(found) == 2
        return found

    until(both_serve, lambda: f"{served.log(0)}\n{served.log(1)}")
    where = f"on node 1 ({two[1].address})"

    ranks = ranks_of_node_1()
    served.process(1, rank_main, "1").kill()
    serves_after(f"rank 1 of 2 {where} was killed by signal 9")

    ranks = ranks_of_node_1()
    served.process(1, rank_main, "0").suspend()
    serves_after(f"rank 0 of 2 {where} was stopped")

    ranks = ranks_of_node_1()
    served.process(1, "--headless").kill()

    def start_again() -> None:
        is_reported_missing()
        all_have_ended()
        served.start_agent()

    serves_after(f"rank 0 of 2 {where} is gone with its node: its `stoker serve", start_again)

    ranks = ranks_of_node_1()
    two.cut(1)

    def fix() -> None:
        is_reported_missing()
        all_have_ended()
        two.fix(1)

    serves_after(f"rank 0 of 2 {where} is gone with its node: it did not respond for 4 s", fix)

    ranks = ranks_of_node_1()
    agent = served.process(1, "--headless")
    for process in (agent, *ranks):
        process.suspend()

    def resume() -> None:
        is_reported_missing()
        agent.resume()
        served.agent.send_signal(signal.SIGCONT)  # nsenter stops when the process that it runs stops

    with ThreadPoolExecutor() as clients:
        answers = list(clients.map(lambda _: served.ask("/v1/completions", BODY)[0], range(4)))
    assert set(answers) <= {200, 500, 503}
    serves_after(f"rank 0 of 2 {where} gave no result for ", resume)

    ranks = ranks_of_node_1()
    (engine,) = (each for each in two[0].processes("stoker_engine.processes.main") if command_line(each)[-1] == "1")
    engine.kill()
    serves_after("the engine process was killed by signal 9")

    os.kill(served.process(0, "--port=8000").pid, signal.SIGTERM)
    assert served.server.wait(60) == 0
    assert served.agent.wait(60) == 0, served.log(1)
    for number in (0, 1):
        assert not two[number].processes(rank_main)
