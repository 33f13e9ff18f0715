"""Prompts → deltas: one request to the engine for each prompt, all running side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from stoker_engine.contract.errors import RequestError
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.request import FinishReason
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.server.engine_client import EngineClient
from stoker_engine.server.responses import PromptTokensDetails, Usage


@dataclass
class Output:
    """What became of one prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class Generation:
    """What one HTTP request has the engine generate. Iterate `deltas` once, or `collect`.

    Attributes:
        id: of the answer; the engine's requests are named after it.
        field_names: what the client calls `prompt` and `max_tokens`, for errors, where it is something else.
        created: when, in Unix seconds.
    """

    client: EngineClient
    id: str
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    field_names: Mapping[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    _completion_tokens: int = 0
    _cached_tokens: dict[int, int] = field(default_factory=dict)

    async def deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yields (index of a prompt, delta), in the order the engine makes them.

        The first error ends all of them. Closing the generator aborts all that still run.

        Raises:
            RequestError: what the engine raised.
        """
        merged: asyncio.Queue[tuple[int, OutputDelta | Exception | None]] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(index, merged)) for index in range(len(self.prompts))]
        running = len(pumps)
        try:
            while running:
                index, item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                    continue
                self._completion_tokens += len(item.token_ids)
                self._cached_tokens[index] = item.num_cached_tokens
                yield index, item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def collect(self) -> list[Output]:
        """Waits for everything; one output a prompt."""
        outputs = [Output() for _ in self.prompts]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                output = outputs[index]
                output.text += delta.text
                output.token_ids += delta.token_ids
                output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        return outputs

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        prompt_tokens = sum(map(len, self.prompts))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens.values())),
        )

    async def _pump(self, index: int, merged: asyncio.Queue[tuple[int, OutputDelta | Exception | None]]) -> None:
        """Moves one prompt's deltas into `merged`; None, or an error, is the last thing it puts there."""
        request_id = f"{self.id}-{index}"
        try:
            async with aclosing(self.client.generate(request_id, self.prompts[index], self.params[index])) as deltas:
                async for delta in deltas:
                    merged.put_nowait((index, delta))
            merged.put_nowait((index, None))
        except RequestError as error:
            error.param = self.field_names.get(error.param or "", error.param)
            merged.put_nowait((index, error))
        except Exception as error:  # raised again where the answer is made
            merged.put_nowait((index, error))
