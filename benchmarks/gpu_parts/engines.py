"""An engine whose steps are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from gpu_parts.context import Context
from gpu_parts.models import SHAPES
from gpu_parts.requests import Request, below
from stoker_engine import LLM, SamplingParams
from stoker_engine.engine import Engine

#: Flags of the formats of weights.
QUANTIZATION = {"bf16": None, "int4": "int4", "fp8": "fp8"}


class TimedEngine:
    """An engine without prefix caching.

    Attributes:
        loaded_s: seconds until it was ready.
        settings: settings on which the figures depend.
        on_step: called after each step with the number of requests that got tokens.
    """

    def __init__(self, context: Context, name: str, stored: str = "bf16", **options: Any) -> None:
        began = time.perf_counter()
        self._vocabulary = SHAPES[name].vocab_size
        self._llm = LLM(
            str(context.model(name)),
            **{
                "device": context.scale.device,
                "quantization": QUANTIZATION[stored],
                "enable_prefix_caching": False,
                **context.scale.options,
                **options,
            },
        )
        self.loaded_s = time.perf_counter() - began
        engine = self._llm.engine
        assert isinstance(engine, Engine)
        scheduler, info = engine.scheduler, engine.info
        is_async = options.get("async_scheduling")
        scheduling = "" if is_async is None else f", {'asynchronous' if is_async else 'synchronous'} scheduling"
        self.settings = (
            f"{stored}, max_num_seqs {info.max_num_seqs}, max_num_batched_tokens {scheduler.max_num_batched_tokens}, "
            f"block_size {info.block_size}, {info.usable_blocks:,} blocks{scheduling}"
        )
        self.on_step: Callable[[int], None] = lambda count: None
        #: Per step: number of requests that got tokens, and the time at which it ended.
        self._ended: list[tuple[int, float]] = []
        step = engine.step

        def timed() -> Any:
            outputs = step()
            self._ended.append((len(outputs.deltas), time.perf_counter()))
            self.on_step(len(outputs.deltas))
            return outputs

        engine.step = timed  # type: ignore[method-assign]

    def generate(self, requests: list[Request], temperature: float = 0.0) -> float:
        """Generate, and return the time in seconds.

        Raises:
            RuntimeError: a request got a wrong number of tokens, which would look like speed.
        """
        requests = below(requests, self._vocabulary)
        params = [SamplingParams(temperature=temperature, max_tokens=out, ignore_eos=True) for _, out in requests]
        self._ended.clear()
        began = time.perf_counter()
        outputs = self._llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        took = time.perf_counter() - began
        for output, (_, expected) in zip(outputs, requests, strict=True):
            if len(output.outputs[0].token_ids) != expected:
                raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens were generated instead of {expected}")
        return took

    @property
    def num_steps(self) -> int:
        """Number of steps of the last call of `generate`."""
        return len(self._ended)

    def step_ms(self, streams: int) -> float:
        """Return the median time from one step's end to the next one's, in ms, over steps in which `streams` requests
        got tokens: with steps in flight this is the time of a step, and the time of a call is not."""
        steps = zip(self._ended, self._ended[1:], strict=False)
        return 1e3 * statistics.median(
            end - begin for (before, begin), (count, end) in steps if before == count == streams
        )

    def close(self) -> None:
        """End the engine."""
        self._llm.close()
