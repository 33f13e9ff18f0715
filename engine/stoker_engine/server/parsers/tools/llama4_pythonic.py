"""Calls of Llama 4, in Python syntax."""

from __future__ import annotations

from typing import ClassVar

from stoker_engine.server.parsers.call_text import Reading
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.tools.pythonic import PythonicToolParser

_BEGIN, _END = "<|python_start|>", "<|python_end|>"


class Llama4PythonicToolParser(PythonicToolParser):
    """``[f(a=1, b="x"), …]``, optionally between ``<|python_start|>`` and ``<|python_end|>``."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END)
    begins = Markers("[", _BEGIN)

    def calls(self, begin: str) -> Reading[None]:
        if begin == "[":
            yield from super().calls(begin)
        else:
            yield from self.text.spaces()
            yield from self.text.text("[")
            yield from self.list_of_calls()
        yield from self.text.closing(_END)
        self.text.accept([])
