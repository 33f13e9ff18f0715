"""Applies requests' rules to logits before tokens are chosen; vectorized over the batch, in vLLM's order.

    allowed_token_ids → bad_words → min_tokens → logit_bias → repetition, frequency and presence penalties

Tokens that a grammar forbids are removed before (`sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.token_ids import TokenIds
from stoker_engine.parallel.transfer import to_device
from stoker_engine.sampling.sampling_metadata import SamplingMetadata

#: Maximum size of a set of end tokens that is forbidden by index; a larger one is applied as a mask.
_FEW = 1000

_Rows = list[tuple[int, SamplingMetadata, LogitRules]]


def process_logits(logits: torch.Tensor, choices: list[SamplingMetadata]) -> torch.Tensor:
    """Apply each request's rules to its row.

    Args:
        logits: [rows, vocabulary] float32.
        choices: one per row.

    Returns:
        `logits` itself if no row has rules to apply; else a modified copy.
    """
    rows: _Rows = [
        (row, choice, rules)
        for row, choice in enumerate(choices)
        if (rules := choice.rules) is not None and (rules.is_lasting or not choice.may_end)
    ]
    if not rows:
        return logits
    logits = logits.clone()
    _keep_allowed(logits, rows)
    _forbid(logits, rows)
    _add_bias(logits, rows)
    _penalise(logits, rows)
    return logits


def _keep_allowed(logits: torch.Tensor, rows: _Rows) -> None:
    for row, _, rules in rows:
        if rules.allowed is not None:
            logits[row].masked_fill_(_mask(rules.allowed, logits).logical_not(), -torch.inf)


def _forbid(logits: torch.Tensor, rows: _Rows) -> None:
    token_lists: list[tuple[int, Sequence[int]]] = []
    many: list[tuple[int, TokenIds]] = []
    for row, choice, rules in rows:
        for ids in () if choice.may_end else rules.end_tokens:
            if len(ids) > _FEW:
                many.append((row, ids))
            else:
                token_lists.append((row, ids.array))
        if rules.bad_words is not None:
            token_lists.append((row, rules.bad_words.completions(choice.known, choice.num_prompt_tokens)))
    token_lists = [(row, tokens) for row, tokens in token_lists if len(tokens)]
    concerned = to_device(sorted({row for row, _ in (*token_lists, *many)}), logits.device)
    if not len(concerned):
        return
    before = logits[concerned]
    if token_lists:
        # An assignment of a number would copy it from the host, for which a GPU's host waits.
        logits.index_put_(_flat_indices(token_lists, logits.device), logits.new_full((), -torch.inf))
    for row, ids in many:
        logits[row].masked_fill_(_mask(ids, logits), -torch.inf)
    # If no allowed token is left in a row, its forbidden tokens are restored, so that a token can be chosen.
    choiceless = logits[concerned].amax(dim=-1) == -torch.inf
    if choiceless.device.type == "cpu" and not choiceless.any():
        return  # a GPU's host would wait for this result
    logits[concerned] = torch.where(choiceless.unsqueeze(1), before, logits[concerned])


def _mask(ids: TokenIds, logits: torch.Tensor) -> torch.Tensor:
    """[vocabulary] bool: whether each token is among `ids`."""
    return to_device(np.frombuffer(ids.mask(logits.shape[-1]), bool), logits.device)


def _add_bias(logits: torch.Tensor, rows: _Rows) -> None:
    biased = [(row, rules) for row, _, rules in rows if len(rules.biases)]
    if biased:
        where = _flat_indices([(row, rules.bias_tokens) for row, rules in biased], logits.device)
        biases = np.concatenate([np.array(rules.biases) for _, rules in biased])
        logits.index_put_(where, to_device(biases, logits.device, logits.dtype), accumulate=True)


def _penalise(logits: torch.Tensor, rows: _Rows) -> None:
    """Apply the repetition penalty to tokens of prompt and output (Keskar et al., 2019), and the frequency and presence
    penalties to tokens of the output (OpenAI's formula)."""
    held: list[tuple[int, Sequence[int]]] = []
    penalties = []
    for row, choice, rules in rows:
        if not rules.is_penalised:
            continue
        assert choice.counts is not None
        counts = np.array(choice.counts.counts)
        additive = rules.frequency * counts + rules.presence * (counts > 0)
        held.append((row, choice.counts.tokens))
        penalties.append(np.stack([np.full(len(counts), rules.repetition), additive]))
    if not held:
        return
    where = _flat_indices(held, logits.device)
    repetition, additive_ = to_device(np.concatenate(penalties, axis=1), logits.device, logits.dtype)
    chosen = logits[where]
    repetition.clamp_(1e-30, 1e30)  # more extreme values would exceed the range of float32
    chosen = torch.where(chosen > 0, (chosen / repetition).clamp_max(torch.finfo().max), chosen * repetition)
    logits[where] = chosen - additive_


def _flat_indices(tokens: list[tuple[int, Sequence[int]]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[(row, tokens of the row), …] → [n] rows and [n] tokens."""
    at_row = np.repeat([row for row, _ in tokens], [len(ids) for _, ids in tokens])
    at_token = np.concatenate([np.array(ids, dtype=np.int64) for _, ids in tokens])
    return to_device(at_row, device), to_device(at_token, device)
