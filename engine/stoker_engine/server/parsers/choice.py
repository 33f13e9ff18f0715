"""Choice of the parsers for a model's output."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.parsers import detect, registry
from stoker_engine.server.parsers.forced_calls import forced_calls
from stoker_engine.server.parsers.parser import AnswerParser, ReasoningParser, ToolParser
from stoker_engine.server.parsers.tool_use import ToolUse

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parsers:
    """The parsers of one model.

    Attributes:
        tools: tool call parser; None if the model's call format is unknown.
        reasoning: reasoning parser; None if the model does not reason or its format is unknown.
    """

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    def forces_own_calls(self, use: ToolUse) -> bool:
        """Return whether calls are forced, and use the model's own format."""
        return use.is_forced and hasattr(self.tools, "forced_call")

    @classmethod
    def of(cls, args: FrontendArgs, template: str | None) -> Parsers:
        """Return the parsers that the flags name, or that the chat template indicates; log detected ones."""
        tools, reasoning = args.tool_call_parser, args.reasoning_parser
        if tools is None and (tools := detect.tool_call_parser(template)) is not None:
            logger.info("tool call parser from the chat template: %s (override: --tool-call-parser)", tools)
        if reasoning is None and (reasoning := detect.reasoning_parser(template)) is not None:
            logger.info("reasoning parser from the chat template: %s (override: --reasoning-parser)", reasoning)
        return cls(
            None if tools is None else registry.tool_parser(tools),
            None if reasoning is None else registry.reasoning_parser(reasoning),
        )


@dataclass(frozen=True)
class Parsing:
    """How to parse the answers to one request.

    Attributes:
        prompt: text of the prompt.
        tools: tools that the model may call, and how; without tools, text of calls is content.
        visible: ids of the special tokens that the parsers need in the text.
        num_calls_before: number of calls in the conversation so far.
        continued: whether the answer continues the last message.
        begins_after: token sequences after any of which the answer of a reasoning model begins.
    """

    parsers: Parsers
    prompt: str
    tools: ToolUse
    visible: frozenset[int]
    begins_after: Sequence[tuple[int, ...]] = ()
    num_calls_before: int = 0
    continued: bool = False

    @property
    def answer_pattern(self) -> str | None:
        """Regular expression for the texts after which the answer begins; None without a reasoning parser."""
        reasoning = self.parsers.reasoning
        if reasoning is None or not reasoning.answer_begins_after:
            return None
        pattern: str | None = getattr(reasoning, "answer_pattern", None)  # set if other texts can also start the answer
        return pattern or "|".join(map(re.escape, reasoning.answer_begins_after))

    def new_parser(self) -> AnswerParser:
        """Return a parser for one sequence."""
        reasoning = self.parsers.reasoning
        return AnswerParser(
            None if reasoning is None else reasoning(self.prompt, self.tools.mode == "auto", self.continued),
            self._new_tool_parser(),
        )

    def _new_tool_parser(self) -> ToolParser | None:
        use, parser = self.tools, self.parsers.tools
        if use.is_forced and not self.parsers.forces_own_calls(use):
            return forced_calls(use.mode)(use.tools, self._new_id)
        return None if parser is None or use.mode == "none" else parser(use.tools)

    def _new_id(self, name: str, call_index: int) -> str | None:
        """Return the id of a forced call, or None if the model's chat template accepts any."""
        new_id = getattr(self.parsers.tools, "new_call_id", None)
        return None if new_id is None else new_id(name, self.num_calls_before + call_index)
