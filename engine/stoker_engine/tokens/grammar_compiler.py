"""Compiles grammars in a worker of the tokenizer process, which can be killed."""

from __future__ import annotations

import resource
from typing import Final

from stoker_common.errors import RequestError
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar.check import check_grammar
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.tokens.vocabulary import Vocabulary

#: Stack size in bytes. Each thread of the engine has more, so a grammar that overflows a stack does so here.
_STACK: Final = 4 * 1024**2


class GrammarCompiler:
    """Compiles grammars for a vocabulary, which is read once and shared with forks. Starts no thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._special = {
            token: token_id
            for token_id in sorted(vocabulary.special_ids)
            if (token := vocabulary.id_to_token(token_id)) is not None
        }
        end = len(vocabulary.tokens)  # a placeholder: the engine knows the end-of-sequence tokens
        self._grammars = Grammars(end + 1, [end])
        self._refusal: RequestError | None = None
        try:
            self._grammars.set_token_table(vocabulary.token_table())
            self._grammars.begin(Grammar(compile_grammar(StructuredOutputs(json_object=True))))
        except RequestError as error:
            self._refusal = error

    def compile_grammar(self, structured: StructuredOutputs) -> str:
        """Return the checked grammar; see `grammar.compile.compile_grammar`.

        Raises:
            RequestError: the grammar is malformed, too large or unsatisfiable, or this vocabulary supports no grammars.
        """
        if self._refusal is not None:
            raise self._refusal
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
        source = compile_grammar(structured, self._special)
        check_grammar(self._grammars, source, f"structured_outputs.{structured.kind}")
        return source
