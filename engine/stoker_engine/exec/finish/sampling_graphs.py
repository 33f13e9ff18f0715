"""Sampling as CUDA graphs: the host launches the head and the choice of tokens at once.

A graph is captured for several numbers of rows of logits (`sizing.step_shapes.sampled_rows`), of two kinds:

    hidden states ──► logits ─┬─► most likely tokens ────────────────────────────────┬─► tokens
    parameters of draws ──────┴─► drawn tokens, if any sequence of the step draws ───┘

The forward pass is another graph (`exec.graphs`) or none; either gives the hidden states, which are copied to a fixed
address. Rows are independent of each other, so the rest of that memory, the padding, may hold anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from stoker_engine.exec.capture_agreement import Capture
from stoker_engine.exec.finish.logits import Logits
from stoker_engine.kernels.select_token import COLUMNS, UNIFORM
from stoker_engine.parallel.communicator import Communicator
from stoker_engine.parallel.transfer import to_device
from stoker_engine.sampling.draw import selection
from stoker_engine.sampling.sampler import Samples, already_chosen, valid_tokens
from stoker_engine.sizing.step_shapes import sampled_rows

#: Parameters of rows in which no token is drawn, and of padding: the random number is negative, and with the others the
#: kernel needs the fewest passes over a row.
_NOT_DRAWN: Final = [
    -1.0 if column == UNIFORM else value
    for column, value in enumerate(selection(temperature=1, top_k=0, top_p=1, min_p=0))
]


@dataclass(frozen=True, eq=False)
class SamplingGraph:
    """The captured sampling of a number of rows.

    Attributes:
        hidden: [rows, width], hidden states, which it reads.
        parameters: float64 [rows, parameters], see `kernels.select_token`, which it reads; None: it draws no token.
        tokens: int64 [rows], the tokens that it writes; all graphs write to the same address.
    """

    hidden: torch.Tensor
    parameters: torch.Tensor | None
    tokens: torch.Tensor
    replay: Callable[[], None]

    def run(self, hidden: torch.Tensor, draws: tuple[np.ndarray, np.ndarray] | None = None) -> Samples:
        """Start to sample a token in each row. The result must be used before the next step is started.

        Args:
            hidden: [count, width]; the graph has at least as many rows.
            draws: indices of the rows in which a token is drawn, and their parameters, float64 [drawn, parameters];
                None: the graph draws no token.
        """
        self.hidden[: len(hidden)].copy_(hidden)
        if self.parameters is not None and draws is not None:
            padded = np.tile(_NOT_DRAWN, (len(self.hidden), 1))
            rows, parameters = draws
            padded[rows] = parameters
            self.parameters.copy_(to_device(padded, hidden.device))
        self.replay()
        return already_chosen(self.tokens[: len(hidden)])


class SamplingGraphs:
    """All graphs of a model's sampling.

    If ranks split the vocabulary, there are only graphs without draws, since a single rank draws for all.

    Args:
        max_rows: maximum number of rows of logits in a step.
        dtype: dtype of hidden states.

    Attributes:
        captured: graphs by number of rows, and whether they draw; empty before the capture.
    """

    def __init__(self, logits: Logits, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.captured: dict[tuple[int, bool], SamplingGraph] = {}
        self._logits, config = logits, logits.model.config
        self._sizes = sampled_rows(config.vocab_size, max_rows, dtype.itemsize)
        largest, width = self._sizes[-1], config.decoder.embedding.size or config.hidden_size
        self._hidden = torch.zeros(largest, width, dtype=dtype, device=device)
        self._parameters = torch.zeros(largest, len(COLUMNS), dtype=torch.float64, device=device)
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)

    @property
    def ranks(self) -> Communicator:
        """The ranks that split the vocabulary, all of which capture."""
        return self._logits.ranks

    def capture(self, capture: Capture, on_captured: Callable[[], None] = lambda: None) -> None:
        """Capture all graphs, those that need the most memory first."""
        captured = dict[tuple[int, bool], SamplingGraph]()
        kinds = (True, False) if self.ranks.size == 1 else (False,)
        for rows, draws in itertools.product(reversed(self._sizes), kinds):
            hidden, parameters = self._hidden[:rows], self._parameters[:rows] if draws else None
            tokens, replay = capture(partial(self._sample, hidden, parameters))
            captured[rows, draws] = SamplingGraph(hidden, parameters, tokens, replay)
            on_captured()
        self.captured = captured

    def find(self, num_rows: int, draws: bool) -> SamplingGraph | None:
        """Return the smallest graph with so many rows; None: there is none."""
        rows = next((size for size in self._sizes if size >= num_rows), 0)
        return self.captured.get((rows, draws))

    def _sample(self, hidden: torch.Tensor, parameters: torch.Tensor | None) -> torch.Tensor:
        logits = self._logits.without_adapters(hidden)
        tokens, largest = self._logits.likeliest(logits)
        if parameters is not None:
            drawn = self._logits.kernels.select_token(logits.float(), parameters)
            tokens = torch.where(parameters[:, UNIFORM] < 0, tokens, drawn)
        return self._tokens[: len(hidden)].copy_(valid_tokens(tokens, largest))
