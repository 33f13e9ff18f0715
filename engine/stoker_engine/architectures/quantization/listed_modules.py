"""Lists of module names and patterns in a ``quantization_config``.

lm_head                     modules with this name and their submodules, anywhere in the model
model.layers.*.mlp.router   ``*`` matches any text; otherwise like a name
re:.*mlp.gate$              a regular expression (`name_patterns`) that matches the start of the full name
Linear                      modules of this class, if the list may contain classes
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.quantization.name_patterns import NamePatterns

#: Maximum number of components of a module's name that are compared; no model has more.
_MOST_WORDS: Final = 50

#: Last components of the names of embeddings in all families; all other matrices are linear layers.
_EMBEDDINGS: Final = ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "tok_embeddings", "embed_positions")


#: Last components of the names of heads and routers.
_HEADS: Final = ("lm_head", "embed_out", "output")
_ROUTERS: Final = ("gate", "router", "shared_expert_gate")


def class_of(module: str) -> str:
    """Return the module's class in transformers: ``Embedding`` or ``Linear``."""
    return "Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear"


def is_head(module: str) -> bool:
    """Whether the module is the language-model head, which is not part of a layer."""
    return module.rpartition(".")[2] in _HEADS and not any(word.isdecimal() for word in module.split("."))


def is_usually_numbers(module: str) -> bool:
    """Whether the module is an embedding, a head or a router, which are usually not quantized."""
    return class_of(module) == "Embedding" or is_head(module) or module.rpartition(".")[2] in _ROUTERS


@dataclass(frozen=True)
class ListedModules:
    """A parsed list of names and patterns.

    Attributes:
        names: name that is not a pattern → its index in the list.
        patterns: all other entries, as patterns of full names.
        pattern_indexes: for each pattern, its index in the list.
        classes: all entries, if they may be names of classes; otherwise empty.
    """

    names: Mapping[str, int] = field(default_factory=dict)
    patterns: NamePatterns = field(default_factory=lambda: NamePatterns(()))
    pattern_indexes: tuple[int, ...] = ()
    classes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Iterable[str], where: str, with_classes: bool = False) -> ListedModules:
        """Parse a list.

        Args:
            where: the list's field in config.json, for messages.
            with_classes: whether names may also be module classes.

        Raises:
            ModelError: a pattern is invalid or not supported, or there are too many.
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
                "too many patterns; use simpler patterns, for example 're:.*mlp.(gate|up)_proj$'"
            ) from None
        return cls(
            {name: index for name, index in indices.items() if name not in patterns},
            matched,
            tuple(patterns.values()),
            frozenset(indices) if with_classes else frozenset(),
        )

    def first(self, module: str) -> int | None:
        """Return the index of the first entry that matches the module's full name, not its class; None if none does."""
        words = module.split(".")[:_MOST_WORDS]
        parts = (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
        found = [self.names[part] for part in parts if part in self.names] if self.names else []
        if (pattern := self.patterns.first(module)) is not None:
            found.append(self.pattern_indexes[pattern])
        return min(found, default=None)

    def name(self, module: str) -> bool:
        """Whether an entry matches the module's full name."""
        return self.first(module) is not None

    def mean(self, module: str) -> bool:
        """Whether an entry matches the module's full name or its class."""
        return self.name(module) or class_of(module) in self.classes


def _expression(name: str) -> str:
    """Return the regular expression of an entry with ``*`` or ``re:``."""
    if name.startswith("re:"):
        return name.removeprefix("re:")
    words = ".*".join(map(re.escape, name.split("*")))
    return rf"(.*\.)?{words}(\..*)?$"
