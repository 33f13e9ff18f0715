"""Structural tags: free text that may contain tags, whose content is constrained. Supports vLLM's two formats.

The first: after one of `triggers`, the text continues with one of the `structures` whose begin starts with it.

    {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f=x>", "schema": {…}, "end": "</f>"}]}

The second is a tree of formats (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html). These are supported:
const_string, any_text, json_schema, regex, grammar, sequence, or, optional, plus, star, repeat, tag, triggered_tags,
tags_with_separator. Stoker adds {"type": "choice", "choices": […]}, for large sets of strings, in which the spelling
of a special token stands for text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from stoker_common.errors import RequestError
from stoker_engine.grammar.choice import lark_of_choice
from stoker_engine.grammar.json_schema import prepare_schema
from stoker_engine.grammar.lark import lark_of
from stoker_engine.grammar.limits import MAX_LENGTH, MAX_NESTING, check_length
from stoker_engine.grammar.regex import regex_grammar

#: Maximum number of the grammar's rules. A format, a tag and an end of free text each become one or two rules.
MAX_RULES: Final = 2_000


class StructuralTags:
    """Creates the grammar of one structural tag.

    Args:
        json_options: format of JSON in the tag: llguidance's ``x-guidance``.
        closed: see `prepare_schema`.
        special: the model's special tokens (spelling → id). Their spellings in const_string, begin, end, triggers
            and separator match the tokens, not text.
    """

    def __init__(
        self,
        param: str,
        json_options: Mapping[str, Any],
        closed: bool = False,
        special: Mapping[str, int] | None = None,
    ) -> None:
        self._param = param
        self._json_options = json_options
        self._closed = closed
        self._special = special or {}
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._depth = 0
        self._tokens: re.Pattern[str] | None = None  # matches the special tokens in the tag

    def grammars(self, source: Any) -> list[dict[str, Any]]:
        """Return llguidance's list of grammars. The first is the start.

        Raises:
            RequestError: the tag is malformed, or has an unsupported constraint.
        """
        tag = self._parse(source)
        text = json.dumps(tag, ensure_ascii=False)
        if present := sorted((token for token in self._special if token and token in text), key=len, reverse=True):
            self._tokens = re.compile(f"({'|'.join(map(re.escape, present))})")
        start = self._format(tag["format"]) if "format" in tag else self._of_structures(tag)
        lark = "\n".join([f"start: {start}", *self._rules, r"ANY_TEXT: /(.|\n)*/"])
        return [{"name": "tags", "lark_grammar": lark}, *self._grammars]

    def _refuse(self, sentence: str) -> NoReturn:
        raise RequestError(f"structural_tag: {sentence}", self._param)

    def _parse(self, source: Any) -> dict[str, Any]:
        if isinstance(source, str):
            if len(source) > MAX_LENGTH:
                self._refuse(f"it has {len(source)} characters; at most {MAX_LENGTH} are allowed")
            try:
                source = json.loads(source)
            except (ValueError, RecursionError) as error:
                self._refuse(f"it is not valid JSON: {error}")
        if not isinstance(source, Mapping):
            self._refuse("it must be an object, or the JSON text of one")
        return dict(source)

    def _get(self, tag: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
        value = tag.get(name, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            type_names = {"str": "a string", "list": "a list", "dict": "an object", "bool": "true or false"}
            self._refuse(f"{name} must be {type_names.get(kind.__name__, 'a number')}")
        return value

    def _of_structures(self, tag: Mapping[str, Any]) -> str:
        structures = [
            {
                "begin": self._get(structure, "begin", str),
                "content": {"type": "json_schema", "json_schema": _or_any(structure.get("schema"))},
                "end": self._get(structure, "end", str),
            }
            for structure in self._get(tag, "structures", list)
            if isinstance(structure, dict) or self._refuse("structures must be objects with begin, schema and end")
        ]
        return self._triggered_tags({"triggers": tag.get("triggers"), "tags": structures})

    def _format(self, source: Any) -> str:
        """Add the rule of a format. Return the rule's name."""
        if not isinstance(source, dict):
            self._refuse("a format must be an object with a type")
        kind = source.get("type")
        makers: dict[Any, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda one: self._text(self._get(one, "value", str)),
            "any_text": lambda one: self._any_text(one),
            "json_schema": lambda one: self._json(one.get("json_schema")),
            "regex": lambda one: self._regex(self._get(one, "pattern", str)),
            "choice": lambda one: self._choice(self._get(one, "choices", list)),
            "grammar": lambda one: self._grammar(self._get(one, "grammar", str)),
            "sequence": lambda one: self._all(one, " "),
            "or": lambda one: self._all(one, " | "),
            "optional": lambda one: f"({self._format(one.get('content'))})?",
            "plus": lambda one: f"({self._format(one.get('content'))})+",
            "star": lambda one: f"({self._format(one.get('content'))})*",
            "repeat": lambda one: self._repeat(one),
            "tag": lambda one: self._tag(one),
            "triggered_tags": lambda one: self._triggered_tags(one),
            "tags_with_separator": lambda one: self._tags_with_separator(one),
        }
        if not isinstance(kind, str) or kind not in makers:
            self._refuse(f"the format {str(kind)[:100]!r} is not supported; use one of {', '.join(makers)}")
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._refuse(f"it nests formats more than {MAX_NESTING} deep")
        rule = self._rule(makers[kind](source))
        self._depth -= 1
        return rule

    def _rule(self, expression: str, options: str = "") -> str:
        if len(self._rules) >= MAX_RULES:
            self._refuse(f"it is too large: its formats, tags and ends become more than {MAX_RULES} grammar rules")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def _text(self, text: str) -> str:
        """Return the literals of a text, with special tokens as tokens."""
        try:
            text.encode()
        except UnicodeEncodeError:
            self._refuse("a text contains a lone surrogate, which is invalid Unicode")
        pieces = self._tokens.split(text) if self._tokens is not None else [text]
        return " ".join(self._literal(piece) for piece in pieces if piece) or '""'

    def _literal(self, piece: str) -> str:
        token_id = self._special.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def _any_text(self, spec: Mapping[str, Any]) -> str:
        if spec.get("excludes") not in (None, []):
            self._refuse("any_text with excludes is not supported; use triggered_tags")
        return "ANY_TEXT"

    def _json(self, schema: Any) -> str:
        prepared = prepare_schema(schema, self._param, self._closed)
        prepared = prepared if isinstance(prepared, dict) else ({} if prepared else {"anyOf": []})
        return self._side_grammar(None, {"x-guidance": self._json_options, **prepared})

    def _side_grammar(self, lark: str | None, schema: Any = None) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, **({"json_schema": schema} if lark is None else {"lark_grammar": lark})})
        return f"@{name}"

    def _choice(self, choices: list[Any]) -> str:
        if not choices or not all(isinstance(choice, str) for choice in choices):
            self._refuse("choices must be a list of one or more strings")
        return self._side_grammar(lark_of_choice(choices, self._param))

    def _grammar(self, grammar: str) -> str:
        check_length(grammar, self._param)
        return self._side_grammar(lark_of(grammar, self._param))

    def _regex(self, pattern: str) -> str:
        return self._side_grammar(regex_grammar(pattern, self._param)["lark_grammar"])

    def _all(self, spec: Mapping[str, Any], joint: str) -> str:
        elements = self._get(spec, "elements", list)
        if not elements:
            self._refuse("elements must not be empty")
        return joint.join(self._format(element) for element in elements)

    def _repeat(self, spec: Mapping[str, Any]) -> str:
        minimum, maximum = self._get(spec, "min", int), self._get(spec, "max", int, -1)
        if minimum < 0 or (maximum != -1 and maximum < minimum) or max(minimum, maximum) > 10_000:
            self._refuse("repeat needs min and max from 0 to 10000 with min <= max; max may be -1 (unlimited)")
        return f"({self._format(spec.get('content'))}){{{minimum},{'' if maximum == -1 else maximum}}}"

    def _tag(self, spec: Any, begin: str | None = None) -> str:
        """Return the expression of a tag.

        Args:
            begin: the part of the tag's begin that is not matched yet; None: all of it.
        """
        if not isinstance(spec, dict):
            self._refuse("a tag must be an object with begin, content and end")
        begin = self._get(spec, "begin", str) if begin is None else begin
        ends = spec.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            self._refuse("end must be a string, or a list of one or more strings")
        content = spec.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not all(ends):
                self._refuse("a tag whose content is any_text needs an end that is not empty")
            return f"{self._text(begin)} {self._until(ends)}"
        after = " | ".join(map(self._text, ends))
        return f"{self._text(begin)} {self._format(content)} ({after})"

    def _until(self, ends: list[str]) -> str:
        """Return the expression of text up to one of several ends."""
        if all(end in self._special for end in ends):
            return f"ANY_TEXT ({' | '.join(map(self._text, ends))})"
        return f"({' | '.join(self._up_to(end) for end in ends)})"

    def _up_to(self, text: str) -> str:
        """Return the expression of any text that ends with the first occurrence of `text`. Free text contains no
        special tokens."""
        first, *rest = [piece for piece in (self._tokens.split(text) if self._tokens else [text]) if piece]
        if first in self._special:
            return self._rule(f"ANY_TEXT {self._text(text)}")
        return " ".join([self._rule(f"ANY_TEXT {self._literal(first)}", "[lazy]"), *map(self._literal, rest)])

    def _triggered_tags(self, spec: Mapping[str, Any]) -> str:
        triggers, tags = self._get(spec, "triggers", list), self._get(spec, "tags", list)
        if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            self._refuse("triggers must be a list of one or more non-empty strings")
        if not tags:
            self._refuse("it has no tags")
        alternatives = [self._triggered(tag, triggers) for tag in tags]
        every = f"({' | '.join(alternatives)})"
        if self._get(spec, "stop_after_first", bool, False):
            return every if self._get(spec, "at_least_one", bool, False) else f"({every} | ANY_TEXT)"
        return f"{every}{'+' if self._get(spec, 'at_least_one', bool, False) else '*'} ANY_TEXT"

    def _triggered(self, tag: Any, triggers: list[str]) -> str:
        begin = self._get(tag, "begin", str) if isinstance(tag, dict) else self._refuse("a tag must be an object")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            self._refuse(f"the tag {begin[:100]!r} starts with none of the triggers")
        tag_rule = self._tag(tag, begin[len(trigger) :])
        return self._rule(f"{self._up_to(trigger)} {tag_rule}")

    def _tags_with_separator(self, spec: Mapping[str, Any]) -> str:
        tags = [self._rule(self._tag(tag)) for tag in self._get(spec, "tags", list)]
        if not tags:
            self._refuse("it has no tags")
        every, separator = f"({' | '.join(tags)})", self._text(self._get(spec, "separator", str))
        more = "" if self._get(spec, "stop_after_first", bool, False) else f" ({separator} {every})*"
        return f"({every}{more})" if self._get(spec, "at_least_one", bool, False) else f"({every}{more})?"


def _or_any(schema: Any) -> Any:
    """Return a schema, or the one of all values if it is absent."""
    return {} if schema is None else schema
