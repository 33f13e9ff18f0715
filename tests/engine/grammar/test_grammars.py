"""An engine's vocabulary is indexed before the first grammar arrives."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from stoker_engine.core.grammar import Grammar
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar import grammars as module
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.grammar.matcher import GrammarError
from stoker_engine.grammar.token_table import TokenTable

TABLE = TokenTable.of([bytes([byte]) for byte in range(256)] + [b""], [256])
SOURCE = compile_grammar(StructuredOutputs(choice=("yes", "no")), {})


def test_vocabulary_is_indexed_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(257, [256])
    grammars.set_token_table(TABLE)
    monkeypatch.setattr(module, "_TokenizerWrapper", None)  # no more reads
    assert grammars.begin(Grammar(SOURCE)) is not None


def test_unreadable_vocabulary_fails_only_grammars(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_end = Grammars(257, [])
    without_end.set_token_table(TABLE)

    def broken(*_: Any) -> Any:
        raise ValueError("no trie")

    monkeypatch.setattr(module, "_TokenizerWrapper", broken)
    grammars = Grammars(257, [256])
    with caplog.at_level(logging.ERROR):
        grammars.set_token_table(TABLE)
    assert "cannot read the vocabulary" in caplog.text
    with pytest.raises(GrammarError):
        without_end.begin(Grammar(SOURCE))
    with pytest.raises(ValueError, match="no trie"):
        grammars.begin(Grammar(SOURCE))
