"""Finds the most likely token of each row if ranks split the vocabulary.

Each rank sends its largest logit and that logit's token, not all logits:

    rank 0's part   0.1  2.5  0.3    →   2.5, token 1  ┐
    rank 1's part   2.5  0.2         →   2.5, token 3  ┴→   token 1 on all ranks: ties go to the first token
"""

from __future__ import annotations

import torch

from stoker_engine.kernels.bundle import Argmax
from stoker_engine.parallel.communicator import Communicator


def vocab_parallel_argmax(
    logits: torch.Tensor, first: int, ranks: Communicator, argmax: Argmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.argmax.argmax` over all ranks' parts, with the same result on all ranks.

    Args:
        logits: [rows, this rank's part of the vocabulary], in a dtype that `argmax` supports.
        first: first token of this part.
        ranks: the ranks that split the vocabulary.
        argmax: the kernel for one part.
    """
    token, largest = argmax(logits)
    local_best = torch.stack([largest.double(), (token + first).double()], dim=-1)  # [rows, 2]; float64 is exact
    largest_by_rank, tokens = ranks.all_gather(local_best).unflatten(-1, (ranks.size, 2)).unbind(-1)  # [rows, ranks]
    best, largest = argmax(largest_by_rank.float())
    return tokens.gather(1, best.unsqueeze(1)).squeeze(1).long(), largest
