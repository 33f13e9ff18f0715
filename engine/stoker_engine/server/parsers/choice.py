"""Which parsers take a model's answers apart."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.openai.messages import Tool
from stoker_engine.server.parsers import detect, registry
from stoker_engine.server.parsers.parser import AnswerParser, ReasoningParser, ToolParser

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parsers:
    """The parsers of one model.

    Attributes:
        tools: of calls; None: it is not known how the model writes them.
        reasoning: of reasoning; None: it does not reason, or it is not known how.
    """

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    @classmethod
    def of(cls, args: FrontendArgs, template: str | None) -> Parsers:
        """Those that the flags name, else those that the chat template shows; says in the log which."""
        tools, reasoning = args.tool_call_parser, args.reasoning_parser
        if tools is None and (tools := detect.tool_call_parser(template)) is not None:
            logger.info("tool calls are read as %s, by the model's chat template (--tool-call-parser)", tools)
        if reasoning is None and (reasoning := detect.reasoning_parser(template)) is not None:
            logger.info("reasoning is read as %s, by the model's chat template (--reasoning-parser)", reasoning)
        return cls(
            None if tools is None else registry.tool_parser(tools),
            None if reasoning is None else registry.reasoning_parser(reasoning),
        )


@dataclass(frozen=True)
class Parsing:
    """How the answers to one request are taken apart.

    Attributes:
        prompt: the text of the prompt.
        tools: those that the model may call; none: what it writes of calls is content.
        visible: ids of the special tokens that parsers go by.
    """

    parsers: Parsers
    prompt: str
    tools: Sequence[Tool]
    visible: frozenset[int]

    def new_parser(self) -> AnswerParser:
        """A parser for one sequence."""
        reasoning, tools = self.parsers.reasoning, self.parsers.tools
        return AnswerParser(
            None if reasoning is None else reasoning(self.prompt),
            None if tools is None or not self.tools else tools(self.tools),
        )
