"""Compiled grammars: compiled in threads while steps run, and cached. Each sequence starts with a copy of one."""

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

#: Maximum number of compiled grammars in the cache.
_KEPT: Final = 64

#: Maximum number of grammars that `Grammars.prepare` compiles concurrently.
_THREADS: Final = 2


@dataclass(eq=False)
class Compiled:
    """A compiled grammar.

    Attributes:
        matcher: matcher in its initial state. Its copies share the states of its lexer, whose number is limited.
        is_worn: whether that limit is reached, so that no copy can continue.
    """

    matcher: LLMatcher
    is_worn: bool = False


class Grammars:
    """The grammars of one engine. Thread-safe.

    Args:
        vocab_size: number of logits per row.
        eos_token_ids: end-of-sequence tokens, allowed exactly where the grammar may end.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._table: TokenTable | None = None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._lock = threading.Lock()  # held while the vocabulary is read, or the cache is accessed
        self._threads: ThreadPoolExecutor | None = None

    def set_token_table(self, table: TokenTable) -> None:
        """Read the vocabulary, before the first grammar. For a large one this takes a second and holds the GIL, so call
        it before requests are served."""
        self._table = table
        if not self.eos_token_ids:
            return  # no grammar can end; `_read` raises an error for each
        with self._lock:
            try:
                self._tokenizer = self._read()
            except Exception:  # only requests with grammars fail
                logger.exception("cannot read the vocabulary for structured outputs")

    def prepare(self, grammar: Grammar) -> Future[object]:
        """Compile a grammar in a thread, unless it is cached. The future's result is the value for
        `Grammar.compiled`; it raises `GrammarError` if the grammar cannot be compiled."""
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, "grammars")
        return self._threads.submit(self._cached, grammar.source)

    def begin(self, grammar: Grammar) -> Matcher:
        """Return the matcher of a new output.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        compiled = grammar.compiled
        if not isinstance(compiled, Compiled) or compiled.is_worn:
            compiled = self._cached(grammar.source)
        return Matcher(compiled.matcher.deep_copy(), self._beginning(grammar), compiled)

    def begin_again(self, grammar: Grammar, worn: Matcher) -> Matcher:
        """Return a new matcher that replaces the worn one of an output. It shares no lexer states, and no new output
        shares those of `worn`.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        if isinstance(worn.shared, Compiled):
            worn.shared.is_worn = True
        return Matcher(self._compile(grammar.source).matcher, self._beginning(grammar))

    def _beginning(self, grammar: Grammar) -> Beginning | None:
        if grammar.begins_after is None:
            return None
        assert self._tokenizer is not None, "the grammar is not compiled yet"
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

        assert self._table is not None, "set_token_table must be called before the first grammar"
        if not self.eos_token_ids:
            raise GrammarError(NO_END)
        vocabulary: Any = _TokenizerWrapper(self._table, self.vocab_size, self.eos_token_ids)
        tokenizer = LLTokenizer(vocabulary, eos_token=self.eos_token_ids)
        self._table = None
        return tokenizer


class _TokenizerWrapper:
    """The vocabulary in llguidance's interface ``TokenizerWrapper``."""

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
    """Return the same grammar, in which forced text may consist of any tokens that spell it.

    By default llguidance requires the tokens into which a tokenizer encodes forced text. The engine has no tokenizer.
    """
    # llguidance distinguishes the two formats in the same way: a list of grammars as JSON, or one grammar in Lark.
    grammars = json.loads(source)["grammars"] if source.lstrip().startswith("{") else [{"lark_grammar": source}]
    name = grammars[0].setdefault("name", "grammar")
    return json.dumps(
        {"grammars": [{"lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: @{name}'}, *grammars]}
    )
