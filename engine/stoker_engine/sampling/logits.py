"""What a request's parameters do to its logits before a token is drawn; vectorised over the batch, in vLLM's order.

    allowed_token_ids → bad_words → min_tokens → logit_bias → repetition, frequency and presence penalties

Each step touches only the rows that ask for it, and of a row only the tokens it is about.
"""

from __future__ import annotations

import numpy as np
import torch

from stoker_engine.core.batch import ScheduledSequence
from stoker_engine.core.sampling_params import SamplingParams

_Rows = list[tuple[int, ScheduledSequence, SamplingParams]]


def process_logits(logits: torch.Tensor, sequences: list[ScheduledSequence]) -> torch.Tensor:
    """Applies each sequence's parameters to its row.

    Args:
        logits: [rows, vocabulary] float32.
        sequences: the row's sequence each.

    Returns:
        `logits` itself where nothing is asked for; else a changed copy.
    """
    rows: _Rows = [
        (row, sequence, sequence.params)
        for row, sequence in enumerate(sequences)
        if isinstance(sequence.params, SamplingParams) and _changes(sequence, sequence.params)
    ]
    if not rows:
        return logits
    logits = logits.clone()
    _keep_allowed(logits, rows)
    _forbid(logits, rows)
    _add_bias(logits, rows)
    _penalise(logits, rows)
    return logits


def _changes(sequence: ScheduledSequence, params: SamplingParams) -> bool:
    return bool(
        params.allowed_token_ids is not None
        or sequence.bad_words
        or sequence.end_tokens
        or params.logit_bias
        or _is_penalised(params)
    )


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _keep_allowed(logits: torch.Tensor, rows: _Rows) -> None:
    for row, _, params in rows:
        if params.allowed_token_ids is not None:
            allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept


def _forbid(logits: torch.Tensor, rows: _Rows) -> None:
    forbidden = [
        (row, token)
        for row, sequence, _ in rows
        for token in (*sequence.end_tokens, *_completions(sequence.known, sequence))
    ]
    if not forbidden:
        return
    where = torch.tensor(forbidden, device=logits.device)
    before = logits[where[:, 0], where[:, 1]]
    logits[where[:, 0], where[:, 1]] = -torch.inf
    # Where nothing allowed is left, what was forbidden is the only answer there is.
    choiceless = (logits == -torch.inf).all(dim=-1)[where[:, 0]]
    if choiceless.any():
        logits[where[choiceless, 0], where[choiceless, 1]] = before[choiceless]


def _completions(known: list[int], sequence: ScheduledSequence) -> list[int]:
    """Last tokens of the bad words whose other tokens the output ends with."""
    output = len(known) - sequence.num_prompt_tokens
    return [
        word[-1]
        for word in sequence.bad_words
        if len(word) == 1 or (len(word) - 1 <= output and tuple(known[1 - len(word) :]) == word[:-1])
    ]


def _add_bias(logits: torch.Tensor, rows: _Rows) -> None:
    biases = [(row, token, bias) for row, _, params in rows for token, bias in params.logit_bias.items()]
    if biases:
        at_row, at_token, bias = zip(*biases, strict=True)
        where = (torch.tensor(at_row, device=logits.device), torch.tensor(at_token, device=logits.device))
        logits.index_put_(where, torch.tensor(bias, dtype=logits.dtype, device=logits.device), accumulate=True)


def _penalise(logits: torch.Tensor, rows: _Rows) -> None:
    """Repetition penalty on prompt and output (Keskar et al., 2019), the other two on the output (OpenAI's formula)."""
    at_row, at_token, numbers = [], [], []
    for row, sequence, params in rows:
        if not _is_penalised(params):
            continue
        tokens, first = np.unique(sequence.known, return_inverse=True)
        counts = np.bincount(first[sequence.num_prompt_tokens :], minlength=len(tokens))
        additive = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        at_row.append(np.full(len(tokens), row))
        at_token.append(tokens)
        numbers.append(np.stack([np.full(len(tokens), params.repetition_penalty), additive]))
    if not at_row:
        return
    where = (
        torch.from_numpy(np.concatenate(at_row)).to(logits.device),
        torch.from_numpy(np.concatenate(at_token)).to(logits.device),
    )
    repetition, additive_ = torch.from_numpy(np.concatenate(numbers, axis=1)).to(logits)
    chosen = logits[where]
    chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    logits[where] = chosen - additive_
