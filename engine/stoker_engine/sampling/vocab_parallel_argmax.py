"""The likeliest token of each row, where ranks share the vocabulary.

What travels is one number and its place from each rank, not the logits:

    rank 0's part   0.1  2.5  0.3    →   2.5, token 1  ┐
    rank 1's part   2.5  0.2         →   2.5, token 3  ┴→   token 1 on all ranks: of equals the first, as in one part
"""

from __future__ import annotations

import torch

from stoker_engine.kernels.bundle import Argmax
from stoker_engine.parallel.communicator import Communicator


def vocab_parallel_argmax(
    logits: torch.Tensor, first: int, ranks: Communicator, argmax: Argmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.argmax.argmax`, of all ranks' parts together; the same on all of them.

    Args:
        logits: [rows, this rank's part of the vocabulary], of what `argmax` takes.
        first: the token that the part begins with.
        ranks: those that have the other parts.
        argmax: of one part.
    """
    token, largest = argmax(logits)
    local_best = torch.stack([largest.double(), (token + first).double()], dim=-1)  # [rows, 2]; both exactly
    largest_by_rank, tokens = ranks.all_gather(local_best).unflatten(-1, (ranks.size, 2)).unbind(-1)  # [rows, ranks]
    best, largest = argmax(largest_by_rank.float())
    return tokens.gather(1, best.unsqueeze(1)).squeeze(1).long(), largest
