"""Captured sampling by Triton's kernels: the results of uncaptured sampling, whatever the padding holds."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stoker_engine.exec.finish.logits import Logits
from stoker_engine.exec.finish.sampling_graphs import SamplingGraphs
from stoker_engine.kernels.select_token import COLUMNS
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.quant.weight_target import Shard
from stoker_engine.sampling.sampler import draw_or_choose

from .....support.engine.device_steps import replayed
from .conftest import ON_CHIP
from .test_select_token import drawn_logits, drawn_parameters

pytestmark = pytest.mark.skipif(ON_CHIP, reason="engines on GPUs have CUDA graphs")


def graphs_of(vocabulary: int, max_rows: int) -> SamplingGraphs:
    """Return the graphs of a model whose hidden states are its logits."""
    embedding = SimpleNamespace(size=vocabulary)
    config = SimpleNamespace(vocab_size=vocabulary, decoder=SimpleNamespace(embedding=embedding))
    model: Any = SimpleNamespace(logits=torch.Tensor.clone, config=config)
    logits = Logits(model, TRITON, SingleRank(), Shard.whole(vocabulary), [vocabulary], BatchRows())
    return SamplingGraphs(logits, max_rows, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("vocabulary", [1, 63, 4097])
def test_tokens_equal_those_of_uncaptured_sampling(vocabulary: int) -> None:
    """For numbers of rows around those of the graphs. Some rows have NaN or infinity, and no token."""
    graphs, rng = graphs_of(vocabulary, 6), random.Random(vocabulary)
    graphs._hidden.fill_(torch.nan)
    graphs.capture(replayed)
    corrupted = 0
    for count in (6, 1, 4, 2, 3, 5):
        hidden = torch.stack([drawn_logits(rng, vocabulary) for _ in range(count)])
        if rng.random() < 0.7:
            hidden[rng.randrange(count), rng.randrange(vocabulary)] = rng.choice([torch.nan, torch.inf])
        for num_drawn in {0, rng.randint(1, count), count}:
            drawn = np.sort(np.array(rng.sample(range(count), num_drawn), dtype=np.int64))
            parameters = np.array([drawn_parameters(rng, vocabulary) for _ in drawn]).reshape(num_drawn, len(COLUMNS))
            graph = graphs.find(count, draws=num_drawn > 0)
            assert graph is not None and len(graph.hidden) == {3: 4, 5: 6}.get(count, count)
            samples = graph.run(hidden, (drawn, parameters) if num_drawn else None)
            expected = draw_or_choose(hidden.clone(), drawn, parameters, 4, TRITON)
            assert samples.collect() == expected.collect()
            assert torch.equal(samples.tokens(), expected.tokens())
            corrupted += sum(each.is_corrupted for each in samples.collect())
    assert corrupted > 0
    assert graphs.find(7, draws=False) is None
