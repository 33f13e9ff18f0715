"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each with an optional channel and recipient.

``<|start|>assistant<|channel|>analysis<|message|>…<|end|>`` is reasoning, the channel ``final`` contains the answer,
and a message to ``functions.NAME`` is a call. Format: OpenAI's Harmony response format.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final

from stoker_engine.server.parsers.markers import MarkedText, Markers

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
CONSTRAIN: Final = "<|constrain|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")  # the last two usually end the sequence, and are not in its text
MARKERS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

#: The end of the prompt, which the model continues.
OPENING: Final = f"{START}assistant"

_MARKERS: Final = Markers(*MARKERS)
_RECIPIENT: Final = re.compile(r"(?:^|\s)to=([^\s<]+)")

#: A possible incomplete header before its channel.
_BEFORE_CHANNEL: Final = re.compile(r"<\|start\|>(?:(?!assistant)[\w.-]*|assistant(?:\s+(?:t?|to|to=\S*\s*))?)")

#: Maximum length of a header in characters; OpenAI's tool names have at most 64.
_LONGEST_HEADER: Final = 1024


@dataclass(frozen=True)
class Header:
    """Header of a message.

    Attributes:
        text: the complete header, including `MESSAGE`.
        written: the part of it that the model wrote; the rest is in the prompt, or implied.
    """

    text: str
    written: str

    @functools.cached_property
    def role(self) -> str:
        """The author, usually the assistant."""
        return re.split(r"[\s<]", self.text.removeprefix(START), maxsplit=1)[0]

    @functools.cached_property
    def channel(self) -> str | None:
        """``analysis``, ``commentary``, ``final`` or another name; None if the header has none."""
        found = re.search(rf"{re.escape(CHANNEL)}\s*([^\s<]+)", self.text)
        return None if found is None else found[1]

    @functools.cached_property
    def recipient(self) -> str | None:
        """The recipient that the header names, before or after the channel; else None."""
        for part in self.text.split(CHANNEL):
            if (found := _RECIPIENT.search(part)) is not None:
                return found[1]
        return None

    @functools.cached_property
    def is_answer(self) -> bool:
        """Whether the message is for the user: the answer, or a preamble of calls."""
        return self.role == "assistant" and self.recipient is None and self.channel in ("final", "commentary", None)

    @functools.cached_property
    def is_reasoning(self) -> bool:
        """Whether the message is reasoning."""
        return self.role == "assistant" and self.recipient is None and self.channel == "analysis"


@dataclass(frozen=True)
class Text:
    """Text inside the current message, or outside of all messages."""

    text: str


@dataclass(frozen=True)
class End:
    """End of a message; `text` is the end marker, or empty if it is missing."""

    text: str


Event = Header | Text | End


class HarmonyReader:
    """Splits text into headers, texts and ends of messages.

    Args:
        opening: start of the message that the text continues.
    """

    def __init__(self, opening: str = OPENING) -> None:
        self._text = MarkedText()
        self._header: str | None = None  # the incomplete header
        self._written = ""  # the part of the incomplete header that the model wrote
        self.header: Header | None = None  # header of the open message
        self.feed(opening)
        self._written = ""
        if self.header is not None:
            self.header = Header(self.header.text, "")

    def feed(self, text: str) -> list[Event]:
        """Return the events of the next piece of text."""
        self._text.feed(text)
        events: list[Event] = []
        while True:
            before, marker = self._text.until(_MARKERS)
            events += self._take(before)
            if marker is None:
                return events
            events += self._take_marker(marker)

    def end(self) -> list[Event]:
        """Return the remaining events at the end of the text; an open message ends."""
        events = self._take(self._text.rest())
        events += self._not_a_header()
        return [*events, *self._close("")]

    def _take(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._header is None:
            return [Text(text)]
        self._header += text
        self._written += text
        return [] if self._may_be_a_header() else self._not_a_header()

    def _take_marker(self, marker: str) -> list[Event]:
        match marker:
            case "<|start|>":
                events = [*self._not_a_header(), *self._close("")]
                self._header = self._written = marker
                return events
            case "<|channel|>" if self._header is None:  # models may omit a message's end and the next one's start
                events = self._close("")
                self._header, self._written = OPENING + marker, marker
                return events
            case "<|channel|>" | "<|constrain|>" if self._header is not None and self._may_go_on(marker):
                self._header += marker
                self._written += marker
                return []
            case "<|message|>" if self._header is not None:
                self.header = Header(self._header + marker, self._written + marker)
                self._header = None
                return [self.header]
            case _ if marker in ENDS and self._header is None and self.header is not None:
                return self._close(marker)
            case _:
                return [*self._not_a_header(), Text(marker)]

    def _may_go_on(self, marker: str) -> bool:
        """Return whether `marker` may follow in the open header."""
        assert self._header is not None
        return (CHANNEL in self._header) == (marker == CONSTRAIN)

    def _may_be_a_header(self) -> bool:
        """Return whether the open header may still become valid, so that other text is not held back for long."""
        assert self._header is not None
        if len(self._header) > _LONGEST_HEADER or "\n" in self._header:
            return False
        if CHANNEL in self._header:
            return True
        return _BEFORE_CHANNEL.fullmatch(self._header) is not None

    def _not_a_header(self) -> list[Event]:
        """Turn text that was held back as a header into `Text`."""
        if self._header is None:
            return []
        self._header = None
        return [Text(self._written)] if self._written else []

    def _close(self, marker: str) -> list[Event]:
        if self.header is None:
            return []
        self.header = None
        return [End(marker)]
