"""Grammars over bytes: the vocabulary is all bytes and one special token, so that texts need no tokenizer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from stoker_engine.core.grammar import Grammar
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar.check import check_grammar
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.grammar.token_table import TokenTable

#: A special token, and its id.
SPECIAL = "<|x|>"
SPECIAL_ID = 256
_END = 257
#: Largest number of property orders of an instance to try.
MAX_ORDERS = 200
#: JSON styles, as arguments of `json.dumps`.
STYLES: tuple[dict[str, Any], ...] = ({"separators": (",", ":")}, {}, {"indent": 2}, {"indent": "\t"})


class ByteMatcher:
    """Compiles structured outputs like the worker, and matches texts."""

    def __init__(self) -> None:
        self._grammars = Grammars(258, [_END])
        self._grammars.set_token_table(
            TokenTable.of([*(bytes([byte]) for byte in range(256)), SPECIAL.encode(), b""], [SPECIAL_ID, _END])
        )

    def compile(self, **constraint: Any) -> str:
        """Compile the grammar of `StructuredOutputs(**constraint)`.

        Raises:
            RequestError: it is refused.
        """
        structured = StructuredOutputs(**constraint)
        source = compile_grammar(structured, {SPECIAL: SPECIAL_ID})
        check_grammar(self._grammars, source, f"structured_outputs.{structured.kind}")
        return source

    def accepts(self, source: str, text: str | bytes | list[int]) -> bool:
        """Return whether a grammar may write `text` and end there."""
        if isinstance(text, str):
            text = text.encode("utf-8", "surrogatepass")
        matcher = self._grammars.begin(Grammar(source)).matcher
        taken = matcher.try_consume_tokens(list(text))
        return taken == len(text) and matcher.is_accepting()

    def writes(self, source: str, instance: Any, **style: Any) -> bool:
        """Return whether a grammar may write a value as JSON in some order of properties; `style` is `json.dumps`'s."""
        texts = (json.dumps(order, ensure_ascii=False, **style) for order in _orders(instance))
        return any(self.accepts(source, text) for text in itertools.islice(texts, MAX_ORDERS))


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for inner in itertools.product(*(list(_orders(value[key])) for key in keys)):
                yield dict(zip(keys, inner, strict=True))
    elif isinstance(value, list):
        for inner in itertools.product(*(list(_orders(each)) for each in value)):
            yield list(inner)
    else:
        yield value
