"""Calls in Python syntax."""

from __future__ import annotations

from stoker_engine.server.parsers.call_parser import CallParser
from stoker_engine.server.parsers.call_text import NotACallError, Reading
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.python_calls import read_call


class PythonicToolParser(CallParser):
    """``[f(a=1, b="x"), …]`` at the start of the answer; elsewhere it is content, as in vLLM.

    Arguments are Python literals, which are converted to JSON.
    """

    begins = Markers("[")

    def calls(self, begin: str) -> Reading[None]:
        if not self.is_first:
            raise NotACallError
        yield from self.list_of_calls()

    def list_of_calls(self) -> Reading[None]:
        """Read the calls after the bracket."""
        separator = ","
        while separator == ",":
            call = yield from read_call(self.text)
            yield from self.text.spaces()
            separator = yield from self.text.text(",", "]")
            self.text.accept(call)
