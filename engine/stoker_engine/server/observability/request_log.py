"""One log line per finished engine request with its token counts and durations; optionally prompts are logged, too."""

from __future__ import annotations

import logging

from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.core.step_report import FinishedRequest, StepReport
from stoker_engine.server.engine.engine_client import TokenTexts

logger = logging.getLogger("stoker_engine.requests")


class RequestLog:
    """Logs the requests of all engines.

    Args:
        log_prompts: whether prompts and parameters are logged on arrival.
        max_log_len: maximum number of logged characters of a prompt; None for no limit.
    """

    def __init__(self, log_prompts: bool, max_log_len: int | None) -> None:
        self._log_prompts = log_prompts
        self._max_log_len = max_log_len

    def on_received(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: RequestParams,
        tokenizer: TokenTexts,
    ) -> None:
        """Log a prompt that has arrived, if prompts are logged."""
        if self._log_prompts:
            prompt = tokenizer.decode(prompt_token_ids, skip_special_tokens=False)[: self._max_log_len]
            logger.info("received %s: %s prompt %r", request_id, params, prompt, extra={"prompt": prompt})

    def on_step(self, report: StepReport) -> None:
        """Log the requests that a step finished."""
        if logger.isEnabledFor(logging.INFO):
            for request in report.finished:
                self._on_finished(request)

    def _on_finished(self, request: FinishedRequest) -> None:
        ttft = None if request.queue is None or request.prefill is None else request.queue + request.prefill
        logger.info(
            "finished %s: %s, prompt %d tokens (%d cached), output %d tokens%s, queue %s, first token %s, total %s",
            request.id,
            request.finish_reason,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_output_tokens,
            f" in {request.n} sequences" if request.n > 1 else "",
            _seconds(request.queue),
            _seconds(ttft),
            _seconds(request.e2e),
            extra={
                "request_id": request.http_request_id,
                "finish_reason": str(request.finish_reason),
                "prompt_tokens": request.num_prompt_tokens,
                "cached_tokens": request.num_cached_tokens,
                "output_tokens": request.num_output_tokens,
                "n": request.n,
                "queue_s": request.queue,
                "ttft_s": ttft,
                "e2e_s": request.e2e,
            },
        )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"
