"""Reasoning of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from stoker_engine.server.parsers import harmony
from stoker_engine.server.parsers.parts import Content, Part, Reasoning


class GptOssReasoningParser:
    """Harmony's channels: ``analysis`` is reasoning; ``final`` and ``commentary`` to the user are content.

    Other messages, such as calls, are content as written, for the tool parser ``openai``. Reasoning messages, and those
    to the user, are joined by newlines, as in vLLM.
    """

    markers: ClassVar[tuple[str, ...]] = harmony.MARKERS
    answer_begins_after: ClassVar[tuple[str, ...]] = tuple(
        f"{harmony.CHANNEL}final{type}{harmony.MESSAGE}" for type in ("", " json", f" {harmony.CONSTRAIN}json")
    )

    # The header may declare any content type; a message with a recipient is no answer.
    answer_pattern: ClassVar[str] = "".join(
        (
            re.escape(f"{harmony.CHANNEL}final"),
            rf"\b(?:(?!to=)[^<\n]|{re.escape(harmony.CONSTRAIN)}){{0,100}}",
            re.escape(harmony.MESSAGE),
        )
    )

    def __init__(self, prompt: str, calls: bool = False, continued: bool = False) -> None:
        opening = prompt.rfind(harmony.START)
        self._reader = harmony.HarmonyReader(prompt[opening:] if opening >= 0 else harmony.OPENING)
        self._seen_kinds: set[type[Content] | type[Reasoning]] = set()
        self._breaks = False  # whether the next text starts a new line
        header = self._reader.header
        self.is_reasoning = header is None or header.is_reasoning
        self._header = header

    def feed(self, text: str) -> list[Part]:
        """Return `Reasoning` and `Content` of the next piece of text."""
        return self._parts(self._reader.feed(text))

    def end(self) -> list[Part]:
        """End the output and return what was held back."""
        return self._parts(self._reader.end())

    def _parts(self, events: Sequence[harmony.Event]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            match event:
                case harmony.Header():
                    self._header = event
                    self.is_reasoning = event.is_reasoning
                    if event.is_reasoning or event.is_answer:
                        self._breaks = (Reasoning if event.is_reasoning else Content) in self._seen_kinds
                    else:
                        parts.append(Content(event.written))
                case harmony.Text():
                    parts.append(self._part(event.text))
                case harmony.End():
                    if self._header is not None and not (self._header.is_reasoning or self._header.is_answer):
                        parts.append(Content(event.text))
                    self._header = None
        return parts

    def _part(self, text: str) -> Part:
        if self._header is None:  # text outside messages
            self.is_reasoning = False
            return Content(text)
        kind = Reasoning if self._header.is_reasoning else Content
        if self._header.is_reasoning or self._header.is_answer:
            self._seen_kinds.add(kind)
            if self._breaks:
                self._breaks = False
                return kind("\n" + text)
        return kind(text)
