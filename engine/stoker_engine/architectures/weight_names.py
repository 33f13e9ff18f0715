"""How the files of one family of decoders spell its weights.

A parameter's name (see `models.decoder`) goes with a name of theirs; ``{i}`` is the layer, ``{j}`` a number within it
(an expert, a head). What the files hold in another form, or several in one tensor, `weight_layout` describes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from stoker_engine.architectures.weight_layout import Fused, HalfSplitPairs, Operation

if TYPE_CHECKING:
    from stoker_engine.architectures.model_config import ModelConfig


@dataclass(frozen=True)
class Destination:
    """Where a tensor of the files goes.

    Attributes:
        param_names: one, or the parts of a fused one.
        operations: applied to it, one after the other; none: the files have our form.
        fused: takes it apart.
    """

    param_names: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    fused: Fused | None = None

    @property
    def moves_rows(self) -> bool:
        """Whether all of this only moves rows about."""
        return all(isinstance(operation, HalfSplitPairs) for operation in self.operations) and (
            self.fused is None or self.fused.moves_rows
        )


@dataclass(frozen=True)
class WeightNames:
    """How one file format spells a family's weights.

    Attributes:
        names: our name to theirs, both without ``.weight`` / ``.bias`` (or ``.columns``, of a quantized matrix); or
            both in full, for a name without such an ending.
        fused: their name, in the same way, to several parameters.
        renames: (pattern, replacement) applied to their names first: prefixes that differ by wrapper.
        operations: pattern of their names to what makes our form of such tensors.
        ignored: patterns of tensors that the files are known to carry and we do not need.
        layer: matches the names of a layer's tensors, with its number as the group; tensors of layers past the last
            are not needed, either (DeepSeek-V3's multi-token prediction). None: there are none.
    """

    names: Mapping[str, str]
    fused: Mapping[str, Fused] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    operations: Mapping[str, Operation] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    layer: str | None = None

    def canonical(self, name: str) -> str:
        """Their `name` without wrapper-dependent prefixes."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def destination(self, name: str, param_names: Container[str], config: ModelConfig) -> Destination | None:
        """Where the tensor with that canonical `name` goes in a model with these parameters; None: nowhere."""
        stem, dot, suffix = name.rpartition(".")
        found = self._fills(name, "", config)
        if suffix in ("weight", "bias", "columns"):
            found += self._fills(stem, dot + suffix, config)
        for filled, fused in found:
            if filled and all(param_name in param_names for param_name in filled):
                made = (each for pattern, each in self.operations.items() if re.search(pattern, name))
                return Destination(filled, tuple(made), fused)
        return None

    def is_ignored(self, name: str, config: ModelConfig) -> bool:
        """Whether the canonical `name` is known and not needed."""
        layer = re.match(self.layer, name) if self.layer else None
        # A damaged name may hold more digits than Python makes a number of.
        past_the_last = layer is not None and (len(layer[1]) > 9 or int(layer[1]) >= config.num_hidden_layers)
        return past_the_last or any(re.search(pattern, name) for pattern in self.ignored)

    def stored_in(self, module: str) -> str | None:
        """The canonical name, without ``.weight``, of the tensor that holds the matrix of our `module`; None: the
        family has no such module. Where there are several tensors, a module of several matrices goes first, a stack of
        experts last. `destination` tells how the matrix is held.
        """
        letters = iter("ij")
        general = re.sub(_NUMBER, lambda number: f"{{{next(letters)}}}", module)
        modules = (theirs for theirs, fused in self.fused.items() if general in fused.parts)
        stacks = (theirs for theirs, fused in self.fused.items() if f"{general}.weight" in fused.parts)
        theirs = next(modules, None) or self.names.get(general) or next(stacks, None)
        return None if theirs is None else _numbered(theirs, re.findall(_NUMBER, module))

    def _fills(self, stem: str, suffix: str, config: ModelConfig) -> list[tuple[tuple[str, ...], Fused | None]]:
        """The parameters that a tensor of that name may hold, and how."""
        numbers = re.findall(_NUMBER, stem)
        found = []
        for target in self._by_shape.get(re.sub(_NUMBER, "#", stem), ()):
            fused = None if isinstance(target, str) else target
            names = [target] if isinstance(target, str) else target.param_names(config)
            found.append((tuple(_numbered(name, numbers) + suffix for name in names), fused))
        return found

    @cached_property
    def _by_shape(self) -> dict[str, list[str | Fused]]:
        """Their names, with # for every number, to what they may hold; a model has parameters for one of these."""
        table: dict[str, list[str | Fused]] = {}
        for ours, theirs in self.names.items():
            table.setdefault(_shape(theirs), []).append(ours)
        for theirs, fused in self.fused.items():
            table.setdefault(_shape(theirs), []).append(fused)
        return table


class _EveryName:
    def __contains__(self, name: object) -> bool:
        return True


#: All names: for `WeightNames.destination`, where the model is not made. Matrices have one possible destination each.
EVERY_NAME: Final = _EveryName()

#: A number that is a whole part of a dotted name.
_NUMBER = r"(?<=\.)\d+(?=\.|$)"


def _shape(name: str) -> str:
    return re.sub(r"\{[ij]\}", "#", name)


def _numbered(name: str, numbers: Sequence[str]) -> str:
    for letter, number in zip("ij", numbers, strict=False):
        name = name.replace(f"{{{letter}}}", number)
    return name
