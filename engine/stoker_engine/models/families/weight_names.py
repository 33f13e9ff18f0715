"""How the files of one family of decoders spell its weights. Which parts it is made of, the contract knows.

A name of ours (a *slot*, see `models.decoder`) goes with a name of theirs; ``{i}`` is the layer, ``{j}`` a number
within it (an expert, a head). Where the files hold several slots in one tensor, a `Fused` says how to take them apart;
where they hold one in another form (transposed, permuted, less by one), a `Change` says how to make it ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, ParamSpec, TypeVar

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.quant.weight_target import WeightTarget

Split = Callable[[torch.Tensor, Sequence[WeightTarget], ModelConfig], Sequence[torch.Tensor]]
Make = Callable[[torch.Tensor, ModelConfig], torch.Tensor]

P = ParamSpec("P")
R = TypeVar("R")


class MovesRows(Generic[P, R]):
    """A `Split` or a `Make` that leaves each row (the numbers along the last dimension) as it is, and only moves rows
    about. So it works on rows of anything: also on their numbers, from which a rank learns which ones it must read.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)


def moves_rows(makes: Sequence[Make], split: Split | None) -> bool:
    """Whether all of these only move rows about."""
    return all(isinstance(each, MovesRows) for each in (*makes, split) if each is not None)


class TakesTurns(Generic[P, R]):
    """A `Split` whose parts lie one after the other along the first dimension, each in as much of it: a stack of
    experts. So it works on a run of them, and a rank that has some experts reads no others.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class Transposed:
    """A `Make` that swaps two dimensions."""

    first: int
    second: int

    def __call__(self, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
        return tensor.transpose(self.first, self.second)


@dataclass(frozen=True)
class Fused:
    """One tensor of the files that holds several slots.

    Attributes:
        parts: the slots, spelled like the keys of `WeightNames.names`; a function where they depend on the config.
        split: the tensor's parts, whole, from the tensor, the slots (for their full shapes) and the config.
    """

    parts: tuple[str, ...] | Callable[[ModelConfig], Sequence[str]]
    split: Split


@dataclass(frozen=True)
class Change:
    """Tensors that the files hold in another form.

    Attributes:
        pattern: matches their names in the files.
        make: our form, from theirs.
    """

    pattern: str
    make: Make


@dataclass(frozen=True)
class Place:
    """Where a tensor of the files goes.

    Attributes:
        slots: one, or the parts of a fused one.
        split: takes a fused one apart.
    """

    slots: tuple[str, ...]
    split: Split | None = None


@dataclass(frozen=True)
class WeightNames:
    """How one file format spells a family's weights.

    Attributes:
        names: our slot to their name, both without ``.weight`` / ``.bias`` (or ``.columns``, of a quantized matrix); or
            both in full, for a name without such an ending.
        fused: their name, in the same way, to several slots.
        renames: (pattern, replacement) applied to their names first: prefixes that differ by wrapper.
        changes: applied to tensors as they are read.
        ignored: patterns of tensors that the files are known to carry and we do not need.
        layer: matches the names of a layer's tensors, with its number as the group; tensors of layers past the last
            are not needed, either (DeepSeek-V3's multi-token prediction). None: there are none.
    """

    names: Mapping[str, str]
    fused: Mapping[str, Fused] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    changes: tuple[Change, ...] = ()
    ignored: tuple[str, ...] = ()
    layer: str | None = None

    def canonical(self, name: str) -> str:
        """Their `name` without wrapper-dependent prefixes."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def place(self, name: str, slots: Container[str], config: ModelConfig) -> Place | None:
        """Where the tensor with that canonical `name` goes in a model with these `slots`; None: nowhere."""
        stem, dot, suffix = name.rpartition(".")
        places = self._places(name, "", config)
        if suffix in ("weight", "bias", "columns"):
            places += self._places(stem, dot + suffix, config)
        return next((place for place in places if place.slots and all(slot in slots for slot in place.slots)), None)

    def is_ignored(self, name: str, config: ModelConfig) -> bool:
        """Whether the canonical `name` is known and not needed."""
        layer = re.match(self.layer, name) if self.layer else None
        # A damaged name may hold more digits than Python makes a number of.
        past_the_last = layer is not None and (len(layer[1]) > 9 or int(layer[1]) >= config.num_hidden_layers)
        return past_the_last or any(re.search(pattern, name) for pattern in self.ignored)

    def makes(self, name: str) -> list[Make]:
        """What makes our form of the tensor with that canonical `name`, one after the other; nothing: it is ours."""
        return [change.make for change in self.changes if re.search(change.pattern, name)]

    def _places(self, stem: str, suffix: str, config: ModelConfig) -> list[Place]:
        numbers = re.findall(_NUMBER, stem)
        places = []
        for target in self._by_shape.get(re.sub(_NUMBER, "#", stem), ()):
            parts = target if isinstance(target, tuple) else target.parts
            names = parts(config) if callable(parts) else parts
            slots = tuple(_numbered(name, numbers) + suffix for name in names)
            places.append(Place(slots, target.split if isinstance(target, Fused) else None))
        return places

    @cached_property
    def _by_shape(self) -> dict[str, list[tuple[str, ...] | Fused]]:
        """Their names, with # for every number, to what they may hold; a model has slots for one of these."""
        table: dict[str, list[tuple[str, ...] | Fused]] = {}
        for ours, theirs in self.names.items():
            table.setdefault(_shape(theirs), []).append((ours,))
        for theirs, fused in self.fused.items():
            table.setdefault(_shape(theirs), []).append(fused)
        return table


#: A number that is a whole part of a dotted name.
_NUMBER = r"(?<=\.)\d+(?=\.|$)"


def _shape(name: str) -> str:
    return re.sub(r"\{[ij]\}", "#", name)


def _numbered(slot: str, numbers: Sequence[str]) -> str:
    for letter, number in zip("ij", numbers, strict=False):
        slot = slot.replace(f"{{{letter}}}", number)
    return slot
