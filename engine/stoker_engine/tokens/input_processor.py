"""A prompt and its parameters → a request for the engine.

Invalid requests are rejected here, so that they never reach the engine or affect other requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from stoker_common import logs
from stoker_common.block_hash import NO_KEYS, CacheKeys
from stoker_common.errors import RequestError
from stoker_engine.core.adapter import NO_ADAPTER, root_key
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.grammar import NO_END, Grammar
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.core.token_ids import TokenIds
from stoker_engine.sizing.cache_groups import blocks_for_beams
from stoker_engine.tokens.bad_words import TokenSequence, sequences, spellings
from stoker_engine.tokens.prompt_tokens import PromptTokens, check_vocabulary, prompt_tokens


class Encoding(Protocol):
    """Encodes texts."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        ...


class InputProcessor:
    """Creates requests for one engine. Its seeds are drawn in order, so only one thread at a time may use it.

    Args:
        tokenizer: encodes bad words; None: callers pass the bad words' token sequences.
    """

    def __init__(self, info: EngineInfo, tokenizer: Encoding | None) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._seeds = random.Random(info.seed)
        self._encoded: tuple[tuple[str, ...], tuple[TokenSequence, ...]] = (), ()

    def request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: tuple[TokenSequence, ...] | None = None,
        grammar: Grammar | None = None,
        adapter: int = NO_ADAPTER,
        adapter_digest: str = "",
    ) -> EngineRequest:
        """Truncate and check a prompt, and create its request; see `of_prompt`.

        Raises:
            RequestError: the request is invalid; `param` names the field, by the names of `SamplingParams`.
        """
        prompt = prompt_tokens(prompt_token_ids, params.truncate_prompt_tokens, params.num_wanted, self._info)
        return self.of_prompt(
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            bad_words=bad_words,
            grammar=grammar,
            adapter=adapter,
            adapter_digest=adapter_digest,
        )

    def of_prompt(
        self,
        request_id: str,
        prompt: PromptTokens,
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: tuple[TokenSequence, ...] | None = None,
        grammar: Grammar | None = None,
        adapter: int = NO_ADAPTER,
        adapter_digest: str = "",
    ) -> EngineRequest:
        """Check the parameters of a checked prompt, and create its request.

        Args:
            bad_words: the token sequences of `params.bad_words`; None: not encoded yet.
            grammar: the compiled `params.structured_outputs`; None if that is None.
            adapter: the number of the request's LoRA adapter.
            adapter_digest: the digest of the adapter's content.

        Raises:
            RequestError: the request is invalid; `param` names the field, by the names of `SamplingParams`.
        """
        max_tokens = self._max_tokens(len(prompt), params)
        self._check_set(params.stop_token_ids, "stop_token_ids")
        self._check_sampling(params, max_tokens)
        if params.num_in_lockstep:
            self._check_lockstep(params.num_in_lockstep, len(prompt), max_tokens)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        bad_word_tokens = self._bad_words(params.bad_words) if bad_words is None else bad_words
        assert (grammar is None) == (params.structured_outputs is None), "the caller must compile the grammar"
        if grammar is not None:
            self._check_ends()
            params = params.with_structured_outputs(None)  # replaced by the grammar
        computed_by = b"" if adapter == NO_ADAPTER else root_key(adapter, adapter_digest)
        return EngineRequest(
            id=request_id,
            prompt_token_ids=prompt,
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            eos_token_ids=frozenset(self._info.eos_token_ids),
            bad_words=bad_word_tokens,
            grammar=grammar,
            priority=priority,
            cache_keys=CacheKeys(cache_salt, computed_by) if cache_salt or computed_by else NO_KEYS,
            adapter=adapter,
            http_request_id=logs.request_id.get(),
        )

    def _check_ends(self) -> None:
        if not any(token_id < self._info.vocab_size for token_id in self._info.eos_token_ids):
            raise RequestError(NO_END, "structured_outputs")

    def _max_tokens(self, length: int, params: RequestParams) -> int:
        """Return the maximum number of tokens of each output, for a prompt of `length` tokens."""
        limit = self._info.max_model_len
        max_tokens = params.max_tokens or limit - length
        if params.num_wanted == 0 and length <= limit:
            return max_tokens  # only the prompt is computed
        if length + max_tokens > limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens; the prompt has {length} and "
                f"max_tokens is {max_tokens}. Reduce max_tokens to at most {limit - length}",
                "max_tokens",
                "context_length_exceeded",
            )
        return max_tokens

    def _bad_words(self, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
        """Return the token sequences of bad words. The prompts of a batch usually share them, so the last is cached."""
        if words != self._encoded[0]:
            assert self._tokenizer is not None, "the caller must encode the bad words"
            texts = spellings(words)
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            self._encoded = words, sequences(words, encoded, self._info.vocab_size)
        return self._encoded[1]

    def _check_sampling(self, params: RequestParams, max_tokens: int) -> None:
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but at most {max_tokens} tokens can be generated", "min_tokens"
            )
        self._check_set(params.allowed_token_ids or (), "allowed_token_ids")
        check_vocabulary(params.logit_bias.keys(), self._info.vocab_size, "logit_bias")
        self._check_logprobs(params)

    def _check_set(self, token_ids: Sequence[int], param: str) -> None:
        ids = TokenIds(token_ids)
        if ids.num_given > self._info.vocab_size:
            raise RequestError(
                f"{param} has {ids.num_given} token ids; the vocabulary has {self._info.vocab_size}", param
            )
        if len(ids):
            check_vocabulary((ids[0], ids[-1]), self._info.vocab_size, param)  # the ids are ascending

    def _check_logprobs(self, params: RequestParams) -> None:
        max_logprobs = self._info.max_logprobs
        for param in ("logprobs", "prompt_logprobs"):
            requested: int | None = getattr(params, param)
            if requested is None or max_logprobs == -1:
                continue
            count = self._info.vocab_size if requested == -1 else requested
            if count > max_logprobs:
                raise RequestError(
                    f"{param} requests {count} tokens per position; this server allows at most {max_logprobs} "
                    "(--max-logprobs)",
                    param,
                )

    def _check_lockstep(self, width: int, num_prompt_tokens: int, max_tokens: int) -> None:
        """Check that `width` beams, which wait for each other, fit the batch and the KV cache."""
        info = self._info
        if width > info.max_num_seqs:
            raise RequestError(f"{width} beams exceed the batch of {info.max_num_seqs} (--max-num-seqs)", "n")
        length = num_prompt_tokens + max_tokens
        needed = blocks_for_beams(
            info.cache_groups, num_prompt_tokens, length, info.step_tokens, info.block_size, width
        )
        if needed > info.usable_blocks:
            raise RequestError(
                f"{width} beams of {length} tokens need {needed} blocks and the KV cache has {info.usable_blocks}; "
                "request fewer beams or a smaller max_tokens",
                "n",
            )
