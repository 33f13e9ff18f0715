"""Compiles what outputs must look like, where it may be ended: in a worker of the tokenizer's process."""

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

#: Bytes of stack. Less than any thread of the engine has: what overflows it does so here.
_STACK: Final = 4 * 1024**2


class GrammarCompiler:
    """Compiles grammars for a vocabulary. It reads that once, so that forks share it; no thread is started."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._special = {
            token: token_id
            for token_id in sorted(vocabulary.special_ids)
            if (token := vocabulary.id_to_token(token_id)) is not None
        }
        end = len(vocabulary.tokens)  # which tokens end an output is the engine's business
        self._grammars = Grammars(end + 1, [end])
        self._refusal: RequestError | None = None
        try:
            self._grammars.set_token_table(vocabulary.token_table())
            self._grammars.begin(Grammar(compile_grammar(StructuredOutputs(json_object=True))))
        except RequestError as error:
            self._refusal = error

    def compile_grammar(self, structured: StructuredOutputs) -> str:
        """The checked grammar; see `grammar.compile.compile_grammar`.

        Raises:
            RequestError: it is malformed, too large, cannot be kept, or this vocabulary writes none.
        """
        if self._refusal is not None:
            raise self._refusal
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
        source = compile_grammar(structured, self._special)
        check_grammar(self._grammars, source, f"structured_outputs.{structured.kind}")
        return source
