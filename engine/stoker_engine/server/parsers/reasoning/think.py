"""Reasoning between ``<think>`` and ``</think>``, the format of most reasoning models."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from stoker_engine.server.parsers.markers import MarkedText, Markers
from stoker_engine.server.parsers.parts import Content, Part, Reasoning

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"

#: Texts between the turns of rendered chats, of several models.
_BETWEEN_TURNS: Final = re.compile(r"<[|｜]|<(?:role|assistant|start_of_turn)>|\[/?INST\]|</s>")


class ThinkReasoningParser:
    """Treats all text as reasoning until ``</think>`` or a call, unless the prompt has closed the reasoning.

    vLLM's parsers of these formats do the same. Text that continues a message in the prompt is reasoning only if that
    message ends in reasoning. An opening tag at the start is dropped, whether or not the prompt contains one. Later
    tags are text, because models may write about them.

    Attributes:
        call_begins: start of a tool call, if models of this format sometimes call without closing their reasoning; else
            None.
    """

    markers: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    answer_begins_after: ClassVar[tuple[str, ...]] = (_CLOSE,)
    call_begins: ClassVar[str | None] = None

    def __init__(self, prompt: str, calls: bool = False, continued: bool = False) -> None:
        self.is_reasoning = _is_last(_OPEN, prompt) if continued else not _is_last(_CLOSE, prompt)
        self._text = MarkedText()
        self._spaces: list[str] = []  # white space at the start
        self._has_started = False
        self._call_begins = self.call_begins if calls else None
        self._markers = Markers(*filter(None, (_OPEN, _CLOSE, self._call_begins)))

    def feed(self, text: str) -> list[Part]:
        """Return `Reasoning` and `Content` of the next piece of text."""
        if not self.is_reasoning:
            return [Content(text)]
        self._text.feed(text)
        reasoning = ""
        while True:
            before, marker = self._text.until(self._markers)
            reasoning += self._reasoning_of(before, marker)
            if marker == _CLOSE or (marker is not None and marker == self._call_begins):
                self.is_reasoning = False
                remainder = self._text.rest()
                return [Reasoning(reasoning), Content(remainder if marker == _CLOSE else marker + remainder)]
            if marker is None:
                return [Reasoning(reasoning)]

    def end(self) -> list[Part]:
        """End the output and return what was held back."""
        remainder = ("" if self._has_started else "".join(self._spaces)) + self._text.rest()
        return [Reasoning(remainder)] if self.is_reasoning else [Content(remainder)]

    def _reasoning_of(self, text: str, marker: str | None) -> str:
        """Return the reasoning in `text` and in the opening tag that may follow it."""
        if not self._has_started:
            self._spaces.append(text)
            if marker is None and not text.strip():
                return ""
            self._has_started = True
            text = "".join(self._spaces)
            if marker == _OPEN and not text.strip():
                return ""
        return text + _OPEN if marker == _OPEN else text


def _is_last(tag: str, prompt: str) -> bool:
    """Return whether `tag` is the last reasoning tag in the prompt's last turn."""
    at = max(prompt.rfind(_OPEN), prompt.rfind(_CLOSE))
    return at >= 0 and prompt.startswith(tag, at) and _BETWEEN_TURNS.search(prompt, at) is None
