"""Body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from pydantic import model_validator

from stoker_common.errors import RequestError
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.server.conversation.request import request_params
from stoker_engine.server.fields.field_types import Count, CountOrAll, CountOrZero, Prompt
from stoker_engine.server.openai.sampled_request import SampledRequest
from stoker_engine.server.openai.unsupported import UnsupportedCompletionFields

#: Maximum number of choices of a request, over all its prompts.
MAX_CHOICES: Final = 1024
#: OpenAI's default of `max_tokens`.
DEFAULT_MAX_TOKENS: Final = 16


class CompletionRequest(UnsupportedCompletionFields, SampledRequest):
    """Prompts to complete, with OpenAI's and vLLM's fields."""

    prompt: Prompt
    max_tokens: CountOrZero | None = None
    best_of: Count | None = None
    logprobs: CountOrAll | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        choices = len(self.prompts) * self.num_sequences
        if not self.prompts:
            raise RequestError("prompt must contain at least one prompt", "prompt")
        if choices > MAX_CHOICES:
            raise RequestError(f"prompts × n may be at most {MAX_CHOICES}, not {choices}", "prompt")
        if self.best_of is not None and self.best_of != self.num_sequences:
            raise RequestError("best_of must equal n, because all generated choices are returned", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 requires echo: true", "max_tokens")
        return self

    @property
    def logprobs_neutral_for_beams(self) -> Mapping[str, Sequence[Any]]:
        """`logprobs`, which must be unset for beam search."""
        return {"logprobs": ()}

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each with `n` choices."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return cast("list[str] | list[list[int]]", self.prompt)

    @property
    def only_echo(self) -> bool:
        """Whether only the prompts are returned; the token that the engine generates after each is discarded."""
        return self.max_tokens == 0

    def params_for(self, defaults: Mapping[str, Any], room: int) -> RequestParams:
        """Return the parameters for a prompt after which at least `room` tokens fit into the context.

        `room` limits the default of `max_tokens`, but no requested value.
        """
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, room)) if self.max_tokens is None else max(1, self.max_tokens)
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is None and self.echo:
            prompt_logprobs = self.logprobs
        sampling = self.sampling(self.logprobs, prompt_logprobs)
        params = request_params(defaults, max_tokens, self.requested_format, sampling, self.beam_search)
        return params.scoring_only() if self.only_echo else params
