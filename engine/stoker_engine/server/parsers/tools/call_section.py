"""Calls between markers, in a section that has its own start and end markers."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

from stoker_engine.server.parsers.call_parser import CallParser
from stoker_engine.server.parsers.call_text import Reading
from stoker_engine.server.parsers.json_calls import JSONCall
from stoker_engine.server.parsers.markers import Markers


class SectionMarkers(NamedTuple):
    """The start and end markers of sections and calls."""

    begin: str
    call_begin: str
    call_end: str
    end: str

    def begins(self) -> Markers:
        """Return the markers that may start a call; models sometimes omit the section's."""
        return Markers(self.begin, self.call_begin)


class CallSectionParser(CallParser):
    """Base of parsers for calls in sections."""

    section: ClassVar[SectionMarkers]

    @abstractmethod
    def call(self) -> Reading[JSONCall]:
        """Read the text between the markers of a call."""

    def calls(self, begin: str) -> Reading[None]:
        text, section = self.text, self.section
        if begin == section.begin:
            yield from text.spaces()
            yield from text.text(section.call_begin)
        marker = section.call_begin
        while marker == section.call_begin:
            call = yield from self.call()
            yield from text.closing(section.call_end)
            text.accept(call.parts())
            yield from text.spaces()
            marker = yield from text.text(section.call_begin, section.end)
        text.accept([])
