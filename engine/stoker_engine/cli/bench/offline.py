"""An engine in this process and requests run through it, which `throughput` and `latency` measure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_common.errors import ArgumentError
from stoker_engine.cli.bench.datasets import Sample
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.core.step_report import StepTimes

if TYPE_CHECKING:
    from stoker_engine.engine import Engine
    from stoker_engine.tokens.tokenizer import Tokenizer


@dataclass
class Run:
    """Measurements of running a set of requests.

    Attributes:
        seconds: wall clock time.
        steps: number of engine steps.
        num_cached_tokens: prompt tokens found in the prefix cache.
        times: phase of a step → seconds, summed over all steps.
    """

    seconds: float = 0.0
    steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(vars(StepTimes()), 0.0))


class OfflineEngine:
    """A loaded engine and its tokenizer.

    Raises:
        ArgumentError, ModelError: the engine or its tokenizer cannot be loaded.
    """

    def __init__(self, args: EngineArgs) -> None:
        from stoker_engine.engine import Engine
        from stoker_engine.models.hub.locate import locate_model, locate_tokenizer
        from stoker_engine.tokens.input_processor import InputProcessor
        from stoker_engine.tokens.tokenizer import Tokenizer

        if args.data_parallel_size > 1:
            raise ArgumentError("--data-parallel-size", "only one engine can be measured; omit it")
        self.engine: Engine = Engine.from_args(args.offline())
        self.tokenizer: Tokenizer = Tokenizer.load(locate_tokenizer(args, locate_model(args)))
        self._inputs = InputProcessor(self.engine.info, self.tokenizer)
        self._count = 0

    def run(
        self, samples: Sequence[Sample], n: int = 1, beams: bool = False, detokenize: bool = True, show: bool = True
    ) -> Run:
        """Run all requests together to their full length: with beam search of width `n` if `beams`, otherwise sampling
        `n` sequences for each prompt, greedily if `n` is 1."""
        from tqdm import tqdm

        from stoker_engine.tokens.output_processor import OutputProcessor

        outputs = OutputProcessor(self.tokenizer)
        requests = []
        for sample in samples:
            params: SamplingParams | BeamSearchParams
            if beams:
                params = BeamSearchParams(beam_width=n, max_tokens=sample.output_len, ignore_eos=True)
            else:
                params = SamplingParams(
                    n=n, temperature=0.0 if n == 1 else 1.0, max_tokens=sample.output_len, ignore_eos=True
                )
            self._count += 1
            requests.append(self._inputs.request(f"bench-{self._count}", sample.prompt, params))
        run = Run()
        with tqdm(total=len(requests), desc="Requests", disable=not show) as bar:
            started = time.perf_counter()
            for request in requests:
                outputs.add(request)
                self.engine.add(request)
            while self.engine.has_work:
                step = self.engine.step()
                run.steps += 1
                for delta in step.deltas:
                    if detokenize:
                        outputs.process(delta)
                    run.num_output_tokens += len(delta.token_ids)
                if step.report is not None:
                    for name in run.times:
                        run.times[name] += getattr(step.report.times, name)
                    for finished in step.report.finished:
                        run.num_prompt_tokens += finished.num_prompt_tokens
                        run.num_cached_tokens += finished.num_cached_tokens
                        bar.update()
            run.seconds = time.perf_counter() - started
        return run
