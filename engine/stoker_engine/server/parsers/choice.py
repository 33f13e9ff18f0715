"""Which parsers take a model's answers apart."""

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
        tools: of calls; None: it is not known how the model writes them.
        reasoning: of reasoning; None: it does not reason, or it is not known how.
    """

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    def forces_own_calls(self, use: ToolUse) -> bool:
        """Whether calls that are a must are written as the model writes them by itself."""
        return use.is_forced and hasattr(self.tools, "forced_call")

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
        tools: those that the model may call, and how; none: what it writes of calls is content.
        visible: ids of the special tokens that parsers go by.
        num_calls_before: calls in the conversation so far.
        continued: whether the answer continues with the last message.
        begins_after: sequences of tokens, after any of which the answer begins where the model reasons before.
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
        """A regular expression that matches what the answer begins after; None: the model does not reason."""
        reasoning = self.parsers.reasoning
        if reasoning is None or not reasoning.answer_begins_after:
            return None
        pattern: str | None = getattr(reasoning, "answer_pattern", None)  # where more than these texts do
        return pattern or "|".join(map(re.escape, reasoning.answer_begins_after))

    def new_parser(self) -> AnswerParser:
        """A parser for one sequence."""
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
        """The id of a forced call, where the model's chat template wants a certain kind."""
        new_id = getattr(self.parsers.tools, "new_call_id", None)
        return None if new_id is None else new_id(name, self.num_calls_before + call_index)
