"""Messages between an engine and its ranks are small, however long the sequences are."""

from __future__ import annotations

import pickle
from pathlib import Path

from stoker_engine import SamplingParams
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.step import Step, StepResult
from stoker_engine.engine import Engine
from stoker_engine.exec.build_runner import build_runner
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.models.checkpoint import find_checkpoint

SEQUENCES, LIMIT = 256, 16 * 1024


class Measured(LocalExecutor):
    """Pickles its inputs and results, like the pipes of ranks."""

    steps: list[tuple[Step, int, int]]

    def launch(self, step: Step) -> None:
        """See `Executor`."""
        self._step = pickle.loads(data := pickle.dumps(step, pickle.HIGHEST_PROTOCOL))
        self._size = len(data)
        super().launch(self._step)

    def collect(self) -> StepResult:
        """See `Executor`."""
        data = pickle.dumps(super().collect(), pickle.HIGHEST_PROTOCOL)
        self.steps.append((self._step, self._size, len(data)))
        return pickle.loads(data)  # type: ignore[no-any-return]


def test_a_step_of_many_decodes_is_small_each_way(tiny_llama: Path) -> None:
    args = EngineArgs(
        str(tiny_llama),
        device="cpu",
        num_gpu_blocks_override=8192,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=16384,
        long_prefill_token_threshold=16384,
    )
    checkpoint = find_checkpoint(args)
    executor = Measured(build_runner(args, checkpoint))
    executor.steps = []
    engine = Engine(args, checkpoint, executor=executor)
    params = SamplingParams(temperature=0, ignore_eos=True)
    for number in range(SEQUENCES):
        prompt = [5 + number % 200] * (400 if number % 32 == 0 else 1 + number % 16)
        engine.add(EngineRequest(str(number), prompt, params, 40, 0, frozenset({1})))
    while engine.has_work:
        engine.step()
    steady = [sizes for step, *sizes in executor.steps if step.num_decodes == SEQUENCES == step.num_tokens]
    assert len(steady) > 30
    assert max(sent for sent, _ in steady) <= LIMIT
    assert max(received for _, received in steady) <= LIMIT
