"""The offline API: ``LLM(model).generate(prompts)``, with vLLM's signatures."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tqdm import tqdm

from stoker_common.errors import AdapterError, RequestError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.lora_request import LoRARequest
from stoker_engine.core.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    OutputDelta,
    RequestOutput,
)
from stoker_engine.core.sampling_defaults import sampling_params
from stoker_engine.core.sampling_params import BeamSearchParams, RequestParams, SamplingParams
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.engine import Engine
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.grammar.check import check_grammar
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.processes.dp_engines import DPEngines
from stoker_engine.tokens.input_processor import InputProcessor
from stoker_engine.tokens.output_processor import OutputProcessor
from stoker_engine.tokens.tokenizer import Tokenizer

#: Text, token ids, or vLLM's dictionaries ``{"prompt": …}`` and ``{"prompt_token_ids": …}``.
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model for use in a script. Several engines (``data_parallel_size``) each run in their own process. These
    processes end with `close`, a ``with`` block, this object or the script, whichever ends first.

    Args:
        model: a local folder, a GGUF file, ``demo://NAME`` or a hub id.
        chat_template: a Jinja template or its file, for `chat`.
        options: fields of `EngineArgs`: the engine's flags of ``stoker serve``, such as ``max_model_len=8192``.

    Raises:
        ArgumentError: an option is invalid or not supported on this machine.
        ModelError: the model cannot be found, read or served.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, **options: Any) -> None:
        args = EngineArgs(model, **options).offline()
        checkpoint = find_checkpoint(args)
        self.tokenizer = Tokenizer.load(checkpoint.path, chat_template)
        self.engine: Engine | DPEngines
        if args.data_parallel_size > 1:
            self.engine = DPEngines(dataclasses.replace(args, model=str(checkpoint.path), revision=None))
        else:
            self.engine = Engine.of_checkpoint(args, checkpoint)
        self._inputs = InputProcessor(self.engine.info, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer)
        self._ids = map(str, itertools.count())
        executor, info = getattr(self.engine, "executor", None), self.engine.info
        self._grammars = (  # validates grammars; shared with the runner if that is in this process
            executor.runner.grammars
            if isinstance(executor, LocalExecutor)
            else Grammars(info.vocab_size, info.eos_token_ids)
        )
        self._has_token_table = False  # whether the engine has the vocabulary
        self._compiled: tuple[StructuredOutputs | None, Grammar | None] = None, None
        self._serves_lora = args.enable_lora
        self._adapters: dict[int, tuple[LoRARequest, int, str]] = {}  # by id: request, number, digest of the content
        self._adapter_numbers = itertools.count()

    def close(self) -> None:
        """Shut down the engine and its processes, which also happens when the script ends."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of `generate`, which include the model's recommended values."""
        return sampling_params({}, self.engine.info.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one or several, each as text, token ids or vLLM's dictionary (``{"prompt": …}`` or
                ``{"prompt_token_ids": …}``). A flat list of integers is one prompt.
            sampling_params: one for all prompts, or one each; None: `get_default_sampling_params`.
            priority: one per prompt, for ``scheduling_policy="priority"``; the lowest is served first.
            lora_request: LoRA adapter, one for all prompts or one each; None: the base model. Needs
                ``enable_lora=True``.

        Returns:
            One output per prompt, in order. If the engine failed on a prompt, its finish reason is ``error``, and the
            log has the cause; other outputs are complete.

        Raises:
            RequestError: a prompt or its parameters are invalid; no prompt is run.
            AdapterError: LoRA is off, an adapter cannot be loaded, or its id refers to another adapter; no prompt is
                run.
        """
        texts, encoded = self._encode(_as_prompts(prompts))
        params = self._params(sampling_params, len(encoded))
        return self._run(encoded, texts, params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one or several conversations; see `generate`.

        Args:
            messages: a conversation, or a list of them: messages in OpenAI's format.
            sampling_params, use_tqdm, lora_request: see `generate`.
            template: ``tools``, ``documents``, ``chat_template``, ``chat_template_kwargs``,
                ``chat_template_content_format``, ``add_generation_prompt`` or ``continue_final_message``.

        Raises:
            RequestError: see `generate`; or there is no chat template, or it rejects the messages.
            AdapterError: see `generate`.
        """
        many: Sequence[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        encoded = [self.tokenizer.render_chat(list(conversation), **template) for conversation in many]
        params = self._params(sampling_params, len(encoded))
        return self._run(encoded, [None] * len(encoded), params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most likely continuations of prompts.

        Args:
            prompts, use_tqdm, lora_request: see `generate`.
            params: parameters for all prompts.

        Returns:
            For each prompt its `beam_width` beams, best first.

        Raises:
            RequestError, AdapterError: see `generate`.
        """
        texts, encoded = self._encode(_as_prompts(prompts))
        outputs = self._run(encoded, texts, [params] * len(encoded), use_tqdm, lora_request=lora_request)
        return [
            BeamSearchOutput(
                [
                    BeamSearchSequence(
                        [*output.prompt_token_ids, *beam.token_ids],
                        beam.cumulative_logprob or 0.0,
                        (output.prompt or "") + beam.text,
                        beam.finish_reason,
                        beam.stop_reason,
                    )
                    for beam in output.outputs
                ]
            )
            for output in outputs
        ]

    def _encode(self, prompts: list[Prompt]) -> tuple[list[str | None], list[list[int]]]:
        texts, encoded = list[str | None](), list[list[int]]()
        for prompt in prompts:
            if isinstance(prompt, Mapping):
                prompt = _from_mapping(prompt)
            texts.append(prompt if isinstance(prompt, str) else None)
            encoded.append(self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt))
        return texts, encoded

    def _params(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self.get_default_sampling_params()] * count
        if len(sampling_params) != count:
            raise RequestError(
                f"{count} prompts but {len(sampling_params)} sampling_params; give one for all or one each"
            )
        return list(sampling_params)

    def _run(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        params: Sequence[RequestParams],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        priorities = priority or [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(priorities)} priorities; give one each")
        adapters = self._adapters_of(lora_request, len(prompts))
        requests = [
            self._inputs.request(
                next(self._ids),
                prompt,
                prompt_params,
                priority=request_priority,
                grammar=self._grammar(prompt_params),
                adapter=adapter,
                adapter_digest=digest,
            )
            for prompt, prompt_params, request_priority, (adapter, digest) in zip(
                prompts, params, priorities, adapters, strict=True
            )
        ]
        outputs = {r.id: _empty(r, text) for r, text in zip(requests, texts, strict=True)}
        for request in requests:
            self._outputs.add(request)
            self.engine.add(request)
        try:
            with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as bar:
                while self.engine.has_work:
                    for token_delta in self.engine.step().deltas:
                        delta, stopped = self._outputs.process(token_delta)
                        if stopped:
                            self.engine.stop(token_delta.request_id, token_delta.index)
                        if delta is not None:
                            bar.update(_add(outputs[delta.request_id], delta))
        finally:
            for request in requests:  # also after an error or Ctrl-C
                self._outputs.forget(request.id)
                self.engine.abort(request.id)
        return list(outputs.values())

    def _adapters_of(
        self, lora_request: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[tuple[int, str]]:
        """Return the number of each prompt's adapter, and the digest of its content."""
        if lora_request is None or isinstance(lora_request, LoRARequest):
            lora_request = [lora_request] * count
        if not isinstance(lora_request, Sequence) or not all(
            each is None or isinstance(each, LoRARequest) for each in lora_request
        ):
            raise RequestError(
                f"lora_request must be a LoRARequest, or one or None for each prompt, got {lora_request!r}"
            )
        if len(lora_request) != count:
            raise RequestError(f"{count} prompts but {len(lora_request)} lora_requests; give one for all or one each")
        return [(NO_ADAPTER, "") if each is None else self._adapter(each) for each in lora_request]

    def _adapter(self, request: LoRARequest) -> tuple[int, str]:
        """Return the number of an adapter and the digest of its content. The first call for an id loads the adapter."""
        if not self._serves_lora:
            raise AdapterError("LoRA is off; create the LLM with enable_lora=True")
        if (known := self._adapters.get(request.lora_int_id)) is None:
            number = next(self._adapter_numbers)
            self._adapters[request.lora_int_id] = request, number, self._load_adapter(request, number)
        elif known[0] != request:
            raise AdapterError(
                f"lora_int_id {request.lora_int_id} already refers to {known[0].lora_name} in {known[0].lora_path}, "
                f"not to {request.lora_name} in {request.lora_path}; choose another id"
            )
        _, number, digest = self._adapters[request.lora_int_id]
        return number, digest

    def _load_adapter(self, request: LoRARequest, number: int) -> str:
        """Load an adapter, and return the digest of its content."""
        ready = self.engine.load_adapter(AdapterSource(number, request.lora_name, request.lora_path))
        try:
            while not ready.done():
                self.engine.step()
        except BaseException:  # for example Ctrl-C
            self.engine.remove_adapter(number)
            raise
        return ready.result().digest

    def _grammar(self, params: RequestParams) -> Grammar | None:
        """Return the validated grammar of `params`, or None if they have no structured outputs."""
        structured = params.structured_outputs
        if structured is None:
            return None
        if structured is self._compiled[0]:  # shared by the requests of a batch
            return self._compiled[1]
        if not self._has_token_table:
            table = self.tokenizer.token_table()
            self.engine.set_token_table(table)
            self._grammars.set_token_table(table)
            self._has_token_table = True
        tokenizer = self.tokenizer
        special = {tokenizer.id_to_token(token_id) or "": token_id for token_id in sorted(tokenizer.special_ids)}
        grammar = Grammar(compile_grammar(structured, special), structured.begins_after)
        check_grammar(self._grammars, grammar.source, f"structured_outputs.{structured.kind}")
        self._compiled = structured, grammar
        return grammar


def _empty(request: EngineRequest, text: str | None) -> RequestOutput:
    completions = [CompletionOutput(index, "", []) for index in range(request.num_sequences)]
    return RequestOutput(request.id, text, request.prompt_token_ids, completions, finished=False)


def _add(output: RequestOutput, delta: OutputDelta) -> int:
    """Append a delta to the output. Returns 1 if it is the request's last delta, else 0."""
    completion = output.outputs[delta.index]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    if delta.logprobs is not None:
        completion.logprobs = (completion.logprobs or []) + delta.logprobs
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
    output.num_cached_tokens = delta.num_cached_tokens
    if delta.finish_reason is None:
        return 0
    completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
    completion.cumulative_logprob = delta.cumulative_logprob
    if completion.logprobs is not None:
        chosen = zip(completion.logprobs, completion.token_ids, strict=True)
        completion.cumulative_logprob = sum(position[token].logprob for position, token in chosen)
    output.finished = all(c.finish_reason is not None for c in output.outputs)
    return int(output.finished)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _from_mapping(prompt: Mapping[str, Any]) -> str | list[int]:
    if prompt.get("prompt_token_ids") is not None:
        return list(prompt["prompt_token_ids"])
    if isinstance(prompt.get("prompt"), str):
        return str(prompt["prompt"])
    raise RequestError("a prompt must be text, token ids, or a dict with 'prompt' or 'prompt_token_ids'", "prompt")
