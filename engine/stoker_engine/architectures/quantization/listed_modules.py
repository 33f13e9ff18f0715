"""Which modules a list of names and patterns means.

lm_head                     the module of that name, or below it, wherever in the model it is
model.layers.*.mlp.router   with ``*`` for anything
re:.*mlp.gate$              a regular expression, for the beginning of the full name
Linear                      modules of that class, where the list may name classes
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_engine.contract.errors import ModelError

#: Longer ones are no names.
_LONGEST: Final = 1000

#: What a pattern may hold of ``*``, ``+`` and ``{2,}``: matching takes up to the name's length to their power.
_MOST_REPEATS: Final = 6

#: A repeated group, which may match the same in so many ways that trying them takes for ever.
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")

#: Last words of the names of embeddings, as families spell them; all other matrices are linear layers.
_EMBEDDINGS: Final = ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "tok_embeddings", "embed_positions")


#: Those of heads, and of what routes to experts. Methods that list no modules leave them and embeddings alone.
_HEADS: Final = ("lm_head", "embed_out")
_ROUTERS: Final = ("gate", "router", "shared_expert_gate")


def class_of(module: str) -> str:
    """What class the module of that name has in transformers: ``Embedding`` or ``Linear``."""
    return "Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear"


def is_head(module: str) -> bool:
    """Whether the module of that name makes logits."""
    return module.rpartition(".")[2] in _HEADS


def is_usually_numbers(module: str) -> bool:
    """Whether the module of that name is an embedding, a head or a router."""
    return class_of(module) == "Embedding" or is_head(module) or module.rpartition(".")[2] in _ROUTERS


@dataclass(frozen=True)
class ListedModules:
    """A list of names and patterns, understood.

    Attributes:
        patterns: for full names.
        classes: names of classes.
    """

    patterns: tuple[re.Pattern[str], ...] = ()
    classes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Iterable[str], field: str, with_classes: bool = False) -> ListedModules:
        """Of what `field` of config.json lists.

        Args:
            with_classes: whether names without a dot may be those of classes.

        Raises:
            ModelError: a regular expression that is none, or one that could take for ever.
        """
        listed = list(dict.fromkeys(names))
        patterns = tuple(_pattern(name, field) for name in listed)
        return cls(patterns, frozenset(listed) if with_classes else frozenset())

    def name(self, module: str) -> bool:
        """Whether the module of that full name is among them by its name."""
        return any(pattern.match(module) for pattern in self.patterns)

    def mean(self, module: str) -> bool:
        """Whether the module of that full name is among them, by its name or its class."""
        return self.name(module) or class_of(module) in self.classes


def _pattern(name: str, field: str) -> re.Pattern[str]:
    if name.startswith("re:"):
        expression = name.removeprefix("re:")
        repeats = len(re.findall(r"[*+{]", expression))
        if len(expression) > _LONGEST or repeats > _MOST_REPEATS or _REPEATED_GROUP.search(expression):
            raise ModelError(
                f"config.json: {field} holds {reprlib.repr(name)}, a pattern that could take too long to match; "
                "name the modules more simply"
            )
        try:
            return re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"config.json: {field} holds {reprlib.repr(name)}, which is no pattern: {error}") from None
    if len(name) > _LONGEST or name.count("*") > _MOST_REPEATS:
        raise ModelError(f"config.json: {field} holds {reprlib.repr(name)}, which is no module's name")
    words = ".*".join(map(re.escape, name.split("*")))
    return re.compile(rf"(.*\.)?{words}(\..*)?$")
