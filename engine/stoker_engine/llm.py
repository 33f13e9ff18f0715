"""The offline API: ``LLM(model).generate(prompts)``, with vLLM's signatures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import RequestError
from stoker_engine.core.outputs import CompletionOutput, RequestOutput
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.engine import Engine

Prompt = str | list[int]


class LLM:
    """A model for use in a script.

    Args:
        model: a local folder, a GGUF file, ``demo://NAME`` or a hub id.
        chat_template: a Jinja template or its file, for `chat`.
        options: fields of `EngineArgs`.

    Raises:
        ArgumentError, ModelError: see `Engine.from_args`.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, **options: Any) -> None:
        self.engine = Engine.from_args(EngineArgs(model, **options), chat_template)
        self._ids = map(str, itertools.count())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, given as text or token ids, batched together.

        Args:
            prompts: one or many. A flat list of integers is one prompt.
            sampling_params: one for all, or one each; None: the defaults.

        Returns:
            One output a prompt, in order.

        Raises:
            RequestError: a prompt or its parameters are invalid; then none is run.
        """
        many = _as_prompts(prompts)
        params = _as_params(sampling_params, len(many))
        encoded = [self.engine.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in many]
        texts = [p if isinstance(p, str) else None for p in many]
        return self._run(encoded, texts, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or many; see `generate`.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        many: Sequence[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        encoded = [self.engine.tokenizer.render_chat(list(conversation)) for conversation in many]
        return self._run(encoded, [None] * len(encoded), _as_params(sampling_params, len(encoded)), use_tqdm)

    def _run(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        params: list[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        requests = [self.engine.request(next(self._ids), *pair) for pair in zip(prompts, params, strict=True)]
        outputs = {
            request.id: RequestOutput(request.id, text, request.prompt_token_ids, [CompletionOutput(0, "", [])], False)
            for request, text in zip(requests, texts, strict=True)
        }
        for request in requests:
            self.engine.add(request)
        try:
            with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as bar:
                while self.engine.has_work:
                    for delta in self.engine.step():
                        output = outputs[delta.request_id]
                        output.outputs[0].text += delta.text
                        output.outputs[0].token_ids += delta.token_ids
                        output.num_cached_tokens = delta.num_cached_tokens
                        if delta.finish_reason is not None:
                            output.finished = True
                            output.outputs[0].finish_reason = delta.finish_reason
                            output.outputs[0].stop_reason = delta.stop_reason
                            bar.update()
        finally:
            for request in requests:  # after Ctrl-C nothing is left behind
                self.engine.abort(request.id)
        return list(outputs.values())


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} sampling_params; give one for all or one each")
    return list(params)
