"""Reasoning between ``<think>`` and ``</think>``: what most models that reason write."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from stoker_engine.server.parsers.markers import MarkedText, Markers
from stoker_engine.server.parsers.parts import Content, Part, Reasoning

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"

#: What stands between the turns of a rendered chat, whichever model it is for.
_BETWEEN_TURNS: Final = re.compile(r"<[|｜]|<(?:role|assistant|start_of_turn)>|\[/?INST\]|</s>")


class ThinkReasoningParser:
    """All is reasoning until ``</think>``, unless the prompt has closed it: so it is also where the text is cut off
    before. vLLM's parsers of these formats do the same. What continues with a message of the prompt is reasoning only
    where that has opened it.

    An opening tag is dropped at the beginning, whether or not the prompt has one already. Later tags are text, since
    a model may well write about them.

    Attributes:
        call_begins: how a call of a tool begins in this format, where models are known to write one without closing
            their reasoning; None: they are not.
    """

    markers: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    answer_begins_after: ClassVar[tuple[str, ...]] = (_CLOSE,)
    call_begins: ClassVar[str | None] = None

    def __init__(self, prompt: str, calls: bool = False, continued: bool = False) -> None:
        self.is_reasoning = _is_last(_OPEN, prompt) if continued else not _is_last(_CLOSE, prompt)
        self._text = MarkedText()
        self._spaces: list[str] = []  # before anything else comes
        self._has_started = False
        self._call_begins = self.call_begins if calls else None
        self._markers = Markers(*filter(None, (_OPEN, _CLOSE, self._call_begins)))

    def feed(self, text: str) -> list[Part]:
        """`Reasoning` and `Content` in a further piece of the text."""
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
        """What was held back, when no more text comes."""
        remainder = ("" if self._has_started else "".join(self._spaces)) + self._text.rest()
        return [Reasoning(remainder)] if self.is_reasoning else [Content(remainder)]

    def _reasoning_of(self, text: str, marker: str | None) -> str:
        """What is reasoning of `text` and the opening tag that may follow it."""
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
    """Whether of both tags this one comes last in the turn that the prompt leaves open."""
    at = max(prompt.rfind(_OPEN), prompt.rfind(_CLOSE))
    return at >= 0 and prompt.startswith(tag, at) and _BETWEEN_TURNS.search(prompt, at) is None
