"""The reasoning of Granite 3.2."""

from __future__ import annotations

from typing import ClassVar, Final

from stoker_engine.server.parsers.markers import MarkedText, Markers
from stoker_engine.server.parsers.parts import Content, Part, Reasoning

_OPENINGS: Final = ("Here is my thought process:", "Here's my thought process:")
_CLOSINGS: Final = ("Here is my response:", "Here's my response:")
_RESPONSE: Final = Markers(*_CLOSINGS)
_ROLE: Final = "<|start_of_role|>"

#: Characters, spaces mostly, after which it is no longer waited for the first sentence.
_WAITS: Final = 100


class GraniteReasoningParser:
    """Granite 3.2's format: ``Here is my thought process: … Here is my response: …``, without special tokens.

    It reasons only where the instructions of the prompt ask for these sentences, or where it begins with the first of
    them; both are dropped, as vLLM does. Whatever else comes first is the answer.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    # Tokens of a sentence differ with what stands before it.
    answer_begins_after: ClassVar[tuple[str, ...]] = (*_CLOSINGS, *(f" {closing}" for closing in _CLOSINGS))

    def __init__(self, prompt: str, calls: bool = False, continued: bool = False) -> None:
        self._beginning: str | None = None if continued else ""  # of the text, until it is known what it is
        self.is_reasoning = _has_opened(prompt) if continued else _is_asked(prompt)
        self._text = MarkedText() if continued and self.is_reasoning else None  # while it reasons

    def feed(self, text: str) -> list[Part]:
        """`Reasoning` and `Content` in a further piece of the text."""
        if self._beginning is not None:
            self._beginning += text
            started = self._beginning.lstrip()
            waits = len(self._beginning) < _WAITS
            if waits and any(opening.startswith(started) for opening in _OPENINGS if opening != started):
                return []
            text, self._beginning = self._beginning, None
            self.is_reasoning = started.startswith(_OPENINGS)
            if self.is_reasoning:
                self._text = MarkedText()
                text = started.partition(":")[2]
        if self._text is None:
            return [Content(text)]
        self._text.feed(text)
        reasoning, closing = self._text.until(_RESPONSE)
        if closing is None:
            return [Reasoning(reasoning)]
        remainder = self._text.rest()
        self._text, self.is_reasoning = None, False
        return [Reasoning(reasoning), Content(remainder)]

    def end(self) -> list[Part]:
        """What was held back, when no more text comes."""
        if self._text is not None:
            return [Reasoning(self._text.rest())]
        return [Content(self._beginning or "")]


def _is_asked(prompt: str) -> bool:
    """Whether the instructions, which come first, ask for the sentences: what users write does not count."""
    instructions = prompt.removeprefix(_ROLE).partition(_ROLE)[0]
    return instructions.startswith("system") and any(closing in instructions for closing in _CLOSINGS)


def _has_opened(prompt: str) -> bool:
    """Whether the message that the prompt begins reasons at its end."""
    message = prompt.rpartition(_ROLE)[2]
    return max(map(message.rfind, _OPENINGS)) > max(map(message.rfind, _CLOSINGS))
