"""A fake engine whose output a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.tokens.output_stream import OutputStream

from ...support.waiting import until_async
from .conftest import FakeEngine, fake_logprobs


class ScriptedEngine(FakeEngine):
    """Generates the next entry of `script` for each request, `piece` characters per step, one character per token.

    Attributes:
        script: for each request, the outputs of its sequences.
        piece: characters per step.
    """

    def __init__(self, *script: str | Sequence[str], piece: int = 1) -> None:
        super().__init__()
        self.info = replace(self.info, max_model_len=65536)
        self.script = [[each] if isinstance(each, str) else list(each) for each in script]
        self.piece = piece

    async def _answer(
        self, stream: OutputStream, request_id: str, prompt: list[int], params: RequestParams, n: int
    ) -> None:
        answers = [answer[: params.max_tokens] for answer in self.script.pop(0)]
        longest = max(map(len, answers))
        assert len(answers) == n
        num_written, hangs_at = 0, self._hangs_at[request_id]
        while num_written <= longest:
            if hangs_at is not None and num_written >= hangs_at:
                await self.released.wait()
            await asyncio.sleep(0)
            await until_async(lambda: not (self.waits_for_reader and stream._pending))
            for index, answer in enumerate(answers):
                if num_written <= len(answer):
                    stream.put(self._next_delta(request_id, prompt, params, index, answer, num_written))
            stream.wake()
            num_written += self.piece

    def _next_delta(
        self, request_id: str, prompt: list[int], params: RequestParams, index: int, answer: str, num_written: int
    ) -> OutputDelta:
        text = answer[num_written : num_written + self.piece]
        tokens = list(map(ord, text))
        reason = None
        if num_written + self.piece > len(answer):
            reason = FinishReason.LENGTH if params.max_tokens == len(answer) else FinishReason.STOP
        logprobs = None
        if params.logprobs is not None:
            logprobs = [fake_logprobs(token, params.logprobs) for token in tokens]
        return OutputDelta(
            request_id=request_id,
            index=index,
            text=text,
            token_ids=tokens,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=0,
            finish_reason=reason,
            logprobs=logprobs,
        )
