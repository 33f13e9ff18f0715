"""Which modules a list of names and patterns means.

lm_head                     the module of that name, or below it, wherever in the model it is
model.layers.*.mlp.router   with ``*`` for anything
re:.*mlp.gate$              a regular expression (`name_patterns`), for the beginning of the full name
Linear                      modules of that class, where the list may name classes
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.quantization.name_patterns import NamePatterns

#: Of a module's name; no model has one of more.
_MOST_WORDS: Final = 50

#: Last words of the names of embeddings, as families spell them; all other matrices are linear layers.
_EMBEDDINGS: Final = ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "tok_embeddings", "embed_positions")


#: Those of heads, and of what routes to experts. Methods that list no modules leave them and embeddings alone.
_HEADS: Final = ("lm_head", "embed_out", "output")
_ROUTERS: Final = ("gate", "router", "shared_expert_gate")


def class_of(module: str) -> str:
    """What class the module of that name has in transformers: ``Embedding`` or ``Linear``."""
    return "Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear"


def is_head(module: str) -> bool:
    """Whether the module of that name makes logits: it is not within layers."""
    return module.rpartition(".")[2] in _HEADS and not any(word.isdecimal() for word in module.split("."))


def is_usually_numbers(module: str) -> bool:
    """Whether the module of that name is an embedding, a head or a router."""
    return class_of(module) == "Embedding" or is_head(module) or module.rpartition(".")[2] in _ROUTERS


@dataclass(frozen=True)
class ListedModules:
    """A list of names and patterns, understood.

    Attributes:
        names: those without ``*``, and at which index of the list they are.
        patterns: of full names; all others.
        pattern_indexes: at which index of the list each pattern is.
        classes: names of classes.
    """

    names: Mapping[str, int] = field(default_factory=dict)
    patterns: NamePatterns = field(default_factory=lambda: NamePatterns(()))
    pattern_indexes: tuple[int, ...] = ()
    classes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Iterable[str], where: str, with_classes: bool = False) -> ListedModules:
        """Of what the field `where` of config.json lists.

        Args:
            with_classes: whether names without a dot may be those of classes.

        Raises:
            ModelError: a regular expression is invalid or not supported.
        """
        indices: dict[str, int] = {}
        for index, name in enumerate(names):
            indices.setdefault(name, index)
        patterns = {name: index for name, index in indices.items() if name.startswith("re:") or "*" in name}
        try:
            matched = NamePatterns(map(_expression, patterns))
        except ValueError as error:
            raise ModelError(
                f"config.json: {where} holds {reprlib.repr(error.args[0])}, a pattern that is not supported, or "
                "too many patterns; name the modules more simply, as in 're:.*mlp.(gate|up)_proj$'"
            ) from None
        return cls(
            {name: index for name, index in indices.items() if name not in patterns},
            matched,
            tuple(patterns.values()),
            frozenset(indices) if with_classes else frozenset(),
        )

    def first(self, module: str) -> int | None:
        """At which place of the list the first is that means the module of that full name by its name; None: none."""
        words = module.split(".")[:_MOST_WORDS]
        parts = (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
        found = [self.names[part] for part in parts if part in self.names] if self.names else []
        if (pattern := self.patterns.first(module)) is not None:
            found.append(self.pattern_indexes[pattern])
        return min(found, default=None)

    def name(self, module: str) -> bool:
        """Whether the module of that full name is among them by its name."""
        return self.first(module) is not None

    def mean(self, module: str) -> bool:
        """Whether the module of that full name is among them, by its name or its class."""
        return self.name(module) or class_of(module) in self.classes


def _expression(name: str) -> str:
    """What means the same as a name with ``*``, or what a name with ``re:`` says."""
    if name.startswith("re:"):
        return name.removeprefix("re:")
    words = ".*".join(map(re.escape, name.split("*")))
    return rf"(.*\.)?{words}(\..*)?$"
