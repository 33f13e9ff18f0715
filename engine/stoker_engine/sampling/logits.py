"""What a request's parameters do to its logits before a token is drawn; vectorised over the batch, in vLLM's order.

    allowed_token_ids → bad_words → min_tokens → logit_bias → repetition, frequency and presence penalties

Each step touches only the rows that ask for it, and of a row only the tokens it is about.
"""

from __future__ import annotations

import numpy as np
import torch

from stoker_engine.core.batch import ScheduledSequence
from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.token_ids import Ids

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
            allowed = torch.from_numpy(rules.allowed).to(logits.device)
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept


def _forbid(logits: torch.Tensor, rows: _Rows) -> None:
    forbidden: list[tuple[int, Ids]] = []
    for row, sequence, rules in rows:
        if not sequence.may_end:
            forbidden.append((row, rules.end_tokens))
        if rules.bad_words is not None:
            forbidden.append((row, rules.bad_words.completions(sequence.known, sequence.num_prompt_tokens)))
    if not any(len(tokens) for _, tokens in forbidden):
        return
    at_row, at_token = _places(forbidden, logits.device)
    before = logits[at_row, at_token]
    logits[at_row, at_token] = -torch.inf
    # Where nothing allowed is left, what was forbidden is the only answer there is.
    concerned = torch.tensor(sorted({row for row, _ in forbidden}), device=logits.device)
    choiceless = concerned[logits[concerned].amax(dim=-1) == -torch.inf]
    if len(choiceless):
        again = torch.isin(at_row, choiceless)
        logits[at_row[again], at_token[again]] = before[again]


def _add_bias(logits: torch.Tensor, rows: _Rows) -> None:
    biased = [(row, rules) for row, _, rules in rows if len(rules.biases)]
    if biased:
        where = _places([(row, rules.bias_tokens) for row, rules in biased], logits.device)
        biases = torch.from_numpy(np.concatenate([rules.biases for _, rules in biased]))
        logits.index_put_(where, biases.to(logits), accumulate=True)


def _penalise(logits: torch.Tensor, rows: _Rows) -> None:
    """Repetition penalty on prompt and output (Keskar et al., 2019), the other two on the output (OpenAI's formula)."""
    held: list[tuple[int, Ids]] = []
    numbers = []
    for row, sequence, rules in rows:
        if not rules.is_penalised:
            continue
        assert sequence.counts is not None
        counts = sequence.counts.counts
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


def _places(tokens: list[tuple[int, Ids]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, its tokens) … → [n] rows and [n] tokens."""
    at_row = np.concatenate([np.full(len(ids), row) for row, ids in tokens])
    at_token = np.concatenate([ids for _, ids in tokens])
    return torch.from_numpy(at_row).to(device), torch.from_numpy(at_token).to(device)
