"""Names of a decoder family's weights in checkpoint files.

Each of Stoker's parameter names (see `models.decoder`) is mapped to a name in the files; ``{i}`` is the layer and
``{j}`` an index within it (an expert or a head). `weight_layout` describes tensors with another form and tensors that
contain several parameters.
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
    """Parameters that a tensor of the files fills.

    Attributes:
        param_names: name of the parameter, or of all parameters in a fused tensor.
        operations: operations to apply to the tensor, in order.
        fused: how to split the tensor; None: it is one parameter.
    """

    param_names: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    fused: Fused | None = None

    @property
    def moves_rows(self) -> bool:
        """Whether the operations and the split only reorder rows."""
        return all(isinstance(operation, HalfSplitPairs) for operation in self.operations) and (
            self.fused is None or self.fused.moves_rows
        )


@dataclass(frozen=True)
class WeightNames:
    """Names of a family's weights in one file format.

    Attributes:
        names: Stoker's name → file's name: either both complete, or both without the suffix ``.weight``, ``.bias`` or,
            for quantized matrices, ``.columns``.
        fused: file's name (in the same form) → the parameters in that tensor.
        renames: (pattern, replacement) pairs that are first applied to the files' names, for prefixes and other parts
            that differ between files.
        operations: pattern of canonical names → operation to apply to these tensors.
        ignored: patterns of canonical names of tensors that are not needed.
        layer: pattern of layers' tensors, with the layer index as its group. Tensors of layers after the last one are
            ignored (DeepSeek-V3's multi-token prediction). None: no tensors are ignored for this reason.
    """

    names: Mapping[str, str]
    fused: Mapping[str, Fused] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    operations: Mapping[str, Operation] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    layer: str | None = None

    def canonical(self, name: str) -> str:
        """Return the file's `name` after `renames`."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def destination(self, name: str, param_names: Container[str], config: ModelConfig) -> Destination | None:
        """Return the parameters that the tensor with this canonical name fills, in a model with `param_names`; None if
        it fills none."""
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
        """Whether the tensor with this canonical name is not needed."""
        layer = re.match(self.layer, name) if self.layer else None
        # A damaged name may have more digits than `int` accepts.
        past_the_last = layer is not None and (len(layer[1]) > 9 or int(layer[1]) >= config.num_hidden_layers)
        return past_the_last or any(re.search(pattern, name) for pattern in self.ignored)

    def stored_in(self, module: str) -> str | None:
        """Return the canonical name, as in `names` and `fused`, of the tensor that contains the matrix of Stoker's
        `module`; None if the family has no such module. Fused modules are preferred, then `names`, then stacks of
        experts."""
        letters = iter("ij")
        general = re.sub(_NUMBER, lambda number: f"{{{next(letters)}}}", module)
        modules = (theirs for theirs, fused in self.fused.items() if general in fused.parts)
        stacks = (theirs for theirs, fused in self.fused.items() if f"{general}.weight" in fused.parts)
        theirs = next(modules, None) or self.names.get(general) or next(stacks, None)
        return None if theirs is None else _numbered(theirs, re.findall(_NUMBER, module))

    def _fills(self, stem: str, suffix: str, config: ModelConfig) -> list[tuple[tuple[str, ...], Fused | None]]:
        """Return all candidates for the tensor: the names of its parameters, and how to split it."""
        numbers = re.findall(_NUMBER, stem)
        found = []
        for target in self._by_shape.get(re.sub(_NUMBER, "#", stem), ()):
            fused = None if isinstance(target, str) else target
            names = [target] if isinstance(target, str) else target.param_names(config)
            found.append((tuple(_numbered(name, numbers) + suffix for name in names), fused))
        return found

    @cached_property
    def _by_shape(self) -> dict[str, list[str | Fused]]:
        """File's name with # for every number → candidates: parameter names or `Fused`s. A model has the parameters of
        at most one candidate."""
        table: dict[str, list[str | Fused]] = {}
        for ours, theirs in self.names.items():
            table.setdefault(_shape(theirs), []).append(ours)
        for theirs, fused in self.fused.items():
            table.setdefault(_shape(theirs), []).append(fused)
        return table


class _EveryName:
    def __contains__(self, name: object) -> bool:
        return True


#: Contains every name: for `WeightNames.destination` without a model. Each matrix has one possible destination.
EVERY_NAME: Final = _EveryName()

#: Number that is a complete component of a dotted name.
_NUMBER = r"(?<=\.)\d+(?=\.|$)"


def _shape(name: str) -> str:
    return re.sub(r"\{[ij]\}", "#", name)


def _numbered(name: str, numbers: Sequence[str]) -> str:
    for letter, number in zip("ij", numbers, strict=False):
        name = name.replace(f"{{{letter}}}", number)
    return name
