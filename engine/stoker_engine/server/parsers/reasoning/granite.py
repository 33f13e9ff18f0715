"""Reasoning of Granite 3.2."""

from __future__ import annotations

from typing import ClassVar, Final

from stoker_engine.server.parsers.markers import MarkedText, Markers
from stoker_engine.server.parsers.parts import Content, Part, Reasoning

_OPENINGS: Final = ("Here is my thought process:", "Here's my thought process:")
_CLOSINGS: Final = ("Here is my response:", "Here's my response:")
_RESPONSE: Final = Markers(*_CLOSINGS)
_ROLE: Final = "<|start_of_role|>"

#: Number of characters, mostly white space, after which the first sentence is no longer expected.
_WAITS: Final = 100


class GraniteReasoningParser:
    """Granite 3.2's format: ``Here is my thought process: … Here is my response: …``, without special tokens.

    The output is reasoning only if it begins with the first of these sentences, or continues a message that ends in
    reasoning; both sentences are dropped, as in vLLM. Any other start is the answer. Until the start is known,
    `is_reasoning` is whether the prompt's system message asks for the sentences.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    # The tokens of a sentence depend on the preceding character.
    answer_begins_after: ClassVar[tuple[str, ...]] = (*_CLOSINGS, *(f" {closing}" for closing in _CLOSINGS))

    def __init__(self, prompt: str, calls: bool = False, continued: bool = False) -> None:
        self._beginning: str | None = None if continued else ""  # start of the text, until its kind is known
        self.is_reasoning = _has_opened(prompt) if continued else _is_asked(prompt)
        self._text = MarkedText() if continued and self.is_reasoning else None  # set during reasoning

    def feed(self, text: str) -> list[Part]:
        """Return `Reasoning` and `Content` of the next piece of text."""
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
        """End the output and return what was held back."""
        if self._text is not None:
            return [Reasoning(self._text.rest())]
        return [Content(self._beginning or "")]


def _is_asked(prompt: str) -> bool:
    """Return whether the system message at the start of the prompt asks for the sentences."""
    instructions = prompt.removeprefix(_ROLE).partition(_ROLE)[0]
    return instructions.startswith("system") and any(closing in instructions for closing in _CLOSINGS)


def _has_opened(prompt: str) -> bool:
    """Return whether the prompt's last message ends in reasoning."""
    message = prompt.rpartition(_ROLE)[2]
    return max(map(message.rfind, _OPENINGS)) > max(map(message.rfind, _CLOSINGS))
