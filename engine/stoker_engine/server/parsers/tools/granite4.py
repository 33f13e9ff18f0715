"""Calls of Granite 4."""

from __future__ import annotations

from stoker_engine.server.parsers.tools.hermes import HermesToolParser


class Granite4ToolParser(HermesToolParser):
    """The format of Hermes."""
