"""Compiled grammars: each is compiled once, beside the steps, and every sequence begins with a copy of it."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stoker_engine.core.grammar import NO_END, Grammar
from stoker_engine.grammar.limits import parser_limits
from stoker_engine.grammar.matcher import Beginning, GrammarError, Matcher, first_line
from stoker_engine.grammar.token_table import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

#: Grammars that are kept compiled, for requests to come.
_KEPT: Final = 64

#: Grammars that are compiled at the same time.
_THREADS: Final = 2


@dataclass(eq=False)
class Compiled:
    """A grammar, compiled.

    Attributes:
        matcher: at the beginning. Its copies share what its lexer has learnt, which is bounded.
        is_worn: whether that bound is reached, so that no copy gets on.
    """

    matcher: LLMatcher
    is_worn: bool = False


class Grammars:
    """The grammars of one engine, safe to use from several threads.

    Args:
        vocab_size: how many logits a row has; ids that the token table has no bytes for are never chosen.
        eos_token_ids: tokens that end an output, allowed exactly where the grammar may end.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._table: TokenTable | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._lock = threading.Lock()  # held for as long as the vocabulary is read, or a grammar looked up
        self._threads: ThreadPoolExecutor | None = None

    def set_token_table(self, table: TokenTable) -> None:
        """Reads the vocabulary; before the first grammar. For a large one this takes a second, in which no other thread
        of the process runs: it is done before anybody is served."""
        self._table = table
        if not self.eos_token_ids:
            return  # no grammar can be kept, which the first one is told
        with self._lock:
            try:
                self._tokenizer = self._read()
            except Exception:  # each grammar fails then, and no other request
                logger.exception("the vocabulary cannot be read for grammars")

    def prepare(self, grammar: Grammar) -> Future[object]:
        """Compiles a grammar in a thread, if it is not compiled already. The
        future has its `Grammar.compiled`, or raises `GrammarError` where it cannot be compiled."""
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, "grammars")
        return self._threads.submit(self._cached, grammar.source)

    def begin(self, grammar: Grammar) -> Matcher:
        """The beginning of an output.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        compiled = grammar.compiled
        if not isinstance(compiled, Compiled) or compiled.is_worn:
            compiled = self._cached(grammar.source)
        return Matcher(compiled.matcher.deep_copy(), self._beginning(grammar), compiled)

    def begin_again(self, grammar: Grammar, worn: Matcher) -> Matcher:
        """The beginning of an output whose matcher is worn out: by others, or alone. This one shares nothing, and no
        output begins with what `worn` shares any more.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        if isinstance(worn.shared, Compiled):
            worn.shared.is_worn = True
        return Matcher(self._compile(grammar.source).matcher, self._beginning(grammar))

    def _beginning(self, grammar: Grammar) -> Beginning | None:
        if grammar.begins_after is None:
            return None
        assert self._tokenizer is not None, "it is compiled"
        return Beginning(grammar.begins_after, self._tokenizer)

    def _cached(self, source: str) -> Compiled:
        with self._lock:
            if (compiled := self._compiled.get(source)) is not None and not compiled.is_worn:
                self._compiled.move_to_end(source)
                return compiled
        compiled = self._compile(source)
        with self._lock:
            self._compiled[source] = compiled
            self._compiled.move_to_end(source)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, source: str) -> Compiled:
        from llguidance import LLMatcher

        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._read()
        matcher = LLMatcher(tokenizer, unforced(source), log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {first_line(matcher.get_error())}")
        return Compiled(matcher)

    def _read(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        assert self._table is not None, "a grammar came before the token table"
        if not self.eos_token_ids:
            raise GrammarError(NO_END)
        vocabulary: Any = _TokenizerWrapper(self._table, self.vocab_size, self.eos_token_ids)
        tokenizer = LLTokenizer(vocabulary, eos_token=self.eos_token_ids)
        self._table = None
        return tokenizer


class _TokenizerWrapper:
    """The vocabulary in the form that llguidance reads: its ``TokenizerWrapper``."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, vocab_size: int, eos_token_ids: list[int]) -> None:
        token_bytes, special = table.unpack()
        self.tokens = token_bytes[:vocab_size] + [b""] * (vocab_size - len(token_bytes))
        self.special_token_ids = sorted({*special, *eos_token_ids})
        self.eos_token_id = eos_token_ids[0]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("the engine has no tokenizer")


def unforced(source: str) -> str:
    """The same grammar, by which text that must come may come in any tokens.

    llguidance would else have the tokens by which a tokenizer writes it, and there is no tokenizer here.
    """
    # As llguidance tells them apart: a list of grammars as JSON, or one in Lark.
    grammars = json.loads(source)["grammars"] if source.lstrip().startswith("{") else [{"lark_grammar": source}]
    name = grammars[0].setdefault("name", "grammar")
    return json.dumps(
        {"grammars": [{"lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: @{name}'}, *grammars]}
    )
