"""A prompt and its parameters → a request that the engine can take as it is.

Everything a request can be refused for is refused here, before it touches the engine or any other request.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from stoker_engine.contract.errors import RequestError
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.core.token_ids import TokenIds
from stoker_engine.sizing.cache_groups import blocks_for_beams
from stoker_engine.tokens.bad_words import TokenSequence, sequences, spellings

Params = SamplingParams | BeamSearchParams


class Encoding(Protocol):
    """Whatever encodes texts."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`texts` as token ids."""
        ...


class InputProcessor:
    """Makes requests for one engine. Its seeds are drawn in order, so one thread at a time may use it.

    Args:
        tokenizer: encodes bad words; None: whoever makes requests has encoded them.
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
        params: Params,
        *,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: tuple[TokenSequence, ...] | None = None,
    ) -> EngineRequest:
        """Checks a prompt and its parameters.

        Args:
            bad_words: the token sequences of `params.bad_words`, if they are encoded already.

        Raises:
            RequestError: the engine cannot serve this; `param` names the field, by the names of `SamplingParams`.
        """
        prompt = truncated(prompt_token_ids, params.truncate_prompt_tokens, params.max_tokens, self._info)
        max_tokens = self._max_tokens(prompt, params)
        seed: int | None = 0
        if isinstance(params, SamplingParams):
            self._check_tokens(params)
            self._check_logprobs(params)
            if bad_words is None:
                bad_words = self._bad_words(params.bad_words)
            seed = params.seed
        else:
            self._check_set(params.stop_token_ids, "stop_token_ids")
            self._check_beams(len(prompt), max_tokens, params.beam_width)
        return EngineRequest(
            id=request_id,
            prompt_token_ids=prompt,
            params=params,
            max_tokens=max_tokens,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            eos_token_ids=frozenset(self._info.eos_token_ids),
            bad_words=bad_words or (),
            priority=priority,
            cache_salt=cache_salt,
        )

    def _max_tokens(self, prompt: list[int], params: Params) -> int:
        """Most tokens of each output, for a prompt that is all right."""
        length, limit = len(prompt), self._info.max_model_len
        if length == 0:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        self._check_vocabulary(prompt, "prompt")
        if length >= limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens and the prompt has {length}; shorten it",
                "prompt",
                "context_length_exceeded",
            )
        max_tokens = params.max_tokens or limit - length
        if length + max_tokens > limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens; the prompt has {length} and "
                f"max_tokens asks for {max_tokens} more. Ask for at most {limit - length}",
                "max_tokens",
                "context_length_exceeded",
            )
        if isinstance(params, SamplingParams) and params.min_tokens > max_tokens:
            raise RequestError(f"min_tokens is {params.min_tokens}, but only {max_tokens} tokens fit", "min_tokens")
        return max_tokens

    def _bad_words(self, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
        """Encoded once for all the prompts of a batch, which mostly share them."""
        if words != self._encoded[0]:
            assert self._tokenizer is not None, "nothing here encodes bad words"
            texts = spellings(words)
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            self._encoded = words, sequences(words, encoded, self._info.vocab_size)
        return self._encoded[1]

    def _check_tokens(self, params: SamplingParams) -> None:
        self._check_set(params.stop_token_ids, "stop_token_ids")
        self._check_set(params.allowed_token_ids or (), "allowed_token_ids")
        self._check_vocabulary(params.logit_bias, "logit_bias")

    def _check_set(self, token_ids: Sequence[int], param: str) -> None:
        ids = TokenIds(token_ids)
        if ids.num_given > self._info.vocab_size:
            raise RequestError(
                f"{param} holds {ids.num_given} token ids; the vocabulary has {self._info.vocab_size}", param
            )
        if len(ids):
            self._check_vocabulary((ids[0], ids[-1]), param)  # they are ascending

    def _check_vocabulary(self, token_ids: Iterable[int], param: str) -> None:
        vocabulary, ids = self._info.vocab_size, list(token_ids)
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            raise RequestError(f"{param} holds a token id outside 0 … {vocabulary - 1}", param)

    def _check_logprobs(self, params: SamplingParams) -> None:
        most = self._info.max_logprobs
        for param in ("logprobs", "prompt_logprobs"):
            asked: int | None = getattr(params, param)
            if asked is None or most == -1:
                continue
            count = self._info.vocab_size if asked == -1 else asked
            if count > most:
                raise RequestError(
                    f"{param} asks for {count} tokens at each position and this server gives at most {most} "
                    "(--max-logprobs)",
                    param,
                )

    def _check_beams(self, num_prompt_tokens: int, max_tokens: int, width: int) -> None:
        """All beams run in the same steps: they must have room at once."""
        info = self._info
        if width > info.max_num_seqs:
            raise RequestError(f"{width} beams do not fit a batch of {info.max_num_seqs} (--max-num-seqs)", "n")
        length = num_prompt_tokens + max_tokens
        needed = blocks_for_beams(
            info.cache_groups, num_prompt_tokens, length, info.step_tokens, info.block_size, width
        )
        if needed > info.usable_blocks:
            raise RequestError(
                f"{width} beams of {length} tokens need {needed} blocks and the KV cache has {info.usable_blocks}; "
                "ask for fewer beams or a smaller max_tokens",
                "n",
            )


def truncated(prompt_token_ids: Sequence[int], keep: int | None, max_tokens: int | None, info: EngineInfo) -> list[int]:
    """The last tokens of a prompt: `keep` of them; -1 is as many as leave room for `max_tokens`, None is all."""
    if keep is None:
        return list(prompt_token_ids)
    if keep == -1:
        keep = max(1, info.max_model_len - (max_tokens or 1))
    return list(prompt_token_ids)[-keep:]
