"""What a request's parameters do to its logits before a token is drawn; vectorised over the batch, in vLLM's order.

    allowed_token_ids → bad_words → min_tokens → logit_bias → repetition, frequency and presence penalties

Each step touches only the rows that ask for it, and of a row only the tokens it is about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stoker_engine.core.batch import ScheduledSequence
from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.token_ids import TokenIds

#: Tokens of a set that are written one by one; more of them by a mask over the vocabulary.
_FEW = 1000

_Rows = list[tuple[int, ScheduledSequence, LogitRules]]


def process_logits(logits: torch.Tensor, sequences: list[ScheduledSequence]) -> torch.Tensor:
    """Applies each sequence's rules to its row.

    Args:
        logits: [rows, vocabulary] float32.
        sequences: the row's sequence each.

    Returns:
        `logits` itself where nothing is asked for; else a changed copy.
    """
    rows: _Rows = [
        (row, sequence, rules)
        for row, sequence in enumerate(sequences)
        if (rules := sequence.rules) is not None and (rules.is_lasting or not sequence.may_end)
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
    few: list[tuple[int, Sequence[int]]] = []
    many: list[tuple[int, TokenIds]] = []
    for row, sequence, rules in rows:
        for ids in () if sequence.may_end else rules.end_tokens:
            if len(ids) > _FEW:
                many.append((row, ids))
            else:
                few.append((row, ids.array))
        if rules.bad_words is not None:
            few.append((row, rules.bad_words.completions(sequence.known, sequence.num_prompt_tokens)))
    few = [(row, tokens) for row, tokens in few if len(tokens)]
    concerned = torch.tensor(sorted({row for row, _ in (*few, *many)}), device=logits.device)
    if not len(concerned):
        return
    before = logits[concerned]
    if few:
        logits[_places(few, logits.device)] = -torch.inf
    for row, ids in many:
        logits[row].masked_fill_(_mask(ids, logits), -torch.inf)
    # Where nothing allowed is left, what was forbidden is the only answer there is.
    choiceless = logits[concerned].amax(dim=-1) == -torch.inf
    if choiceless.any():
        logits[concerned[choiceless]] = before[choiceless]


def _mask(ids: TokenIds, logits: torch.Tensor) -> torch.Tensor:
    """[vocabulary] whether each token is among `ids`."""
    return torch.from_numpy(np.frombuffer(ids.mask(logits.shape[-1]), bool)).to(logits.device)


def _add_bias(logits: torch.Tensor, rows: _Rows) -> None:
    biased = [(row, rules) for row, _, rules in rows if len(rules.biases)]
    if biased:
        where = _places([(row, rules.bias_tokens) for row, rules in biased], logits.device)
        biases = torch.from_numpy(np.concatenate([np.array(rules.biases) for _, rules in biased]))
        logits.index_put_(where, biases.to(logits), accumulate=True)


def _penalise(logits: torch.Tensor, rows: _Rows) -> None:
    """Repetition penalty on prompt and output (Keskar et al., 2019), the other two on the output (OpenAI's formula)."""
    held: list[tuple[int, Sequence[int]]] = []
    numbers = []
    for row, sequence, rules in rows:
        if not rules.is_penalised:
            continue
        assert sequence.counts is not None
        counts = np.array(sequence.counts.counts)
        additive = rules.frequency * counts + rules.presence * (counts > 0)
        held.append((row, sequence.counts.tokens))
        numbers.append(np.stack([np.full(len(counts), rules.repetition), additive]))
    if not held:
        return
    where = _places(held, logits.device)
    repetition, additive_ = torch.from_numpy(np.concatenate(numbers, axis=1)).to(logits)
    chosen = logits[where]
    repetition.clamp_(1e-30, 1e30)  # beyond these, logits would leave what float32 holds
    chosen = torch.where(chosen > 0, (chosen / repetition).clamp_max(torch.finfo().max), chosen * repetition)
    logits[where] = chosen - additive_


def _places(tokens: list[tuple[int, Sequence[int]]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, its tokens) … → [n] rows and [n] tokens."""
    at_row = np.repeat([row for row, _ in tokens], [len(ids) for _, ids in tokens])
    at_token = np.concatenate([np.array(ids, dtype=np.int64) for _, ids in tokens])
    return torch.from_numpy(at_row).to(device), torch.from_numpy(at_token).to(device)
