"""Pairs of checkpoints for tests of whole models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .quantized_pairs import Pair, make_pair, source_model


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Callable[[str, str], Pair]:
    """Return a model of this family, quantized by this method."""
    sources = dict[str, Path]()

    def make(family: str, method: str) -> Pair:
        folder = tmp_path_factory.mktemp("pair")
        if family not in sources:
            sources[family] = tmp_path_factory.mktemp("source")
            source_model(family).save_pretrained(sources[family])
        return make_pair(family, method, folder, sources[family], tiny_llama)

    return make
