"""Reads the names, shapes and dtypes of an adapter's matrices, not their elements, and checks them against the model.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [rank, inputs]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [outputs, rank]
    base_model.model.model.embed_tokens.lora_embedding_A, _B            [rank, vocabulary], [width, rank]
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight, …     of a parameter that stacks experts:
                                                      [experts × rank, inputs], [outputs, rank × experts]

Modules have the names of the family's checkpoints, so they are mapped to parameters as a checkpoint's tensors are. A
tensor that belongs to no parameter is an error; the model's own embedding and head, which PEFT may save, are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch

from stoker_common.errors import AdapterError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.weight_names import Destination, WeightNames
from stoker_engine.lora.adapter_config import FILE, AdapterConfig
from stoker_engine.lora.adapter_files import TENSORS, AdapterFiles, StoredTensor
from stoker_engine.models.loading.weight_files import some

_MAX_NAME_CHARACTERS: Final = 500

#: Maximum number of layouts for which checks, or a packing, are remembered. Adapters of one team mostly have the same
#: layout.
MAX_LAYOUTS: Final = 16

_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)(?P<nested>(\.base_layer)*)"
    r"\.(?:lora_(?P<half>[AB])\.weight|lora_embedding_(?P<embedding_half>[AB]))"
)
_OWN = re.compile(r"base_model\.model\.(?P<module>(?:.+\.)?\w+)\.base_layer\.(?:weight|bias)")
#: Suffixes of the names of tensors that are not supported, with the reason.
_FOREIGN: Final = {
    ".lora_magnitude_vector": "DoRA rescales the model's weights; merge the adapter into the model",
    ".lora_B.bias": "B has a bias",
    ".weight": "the adapter replaces whole modules; merge it into the model",
    ".bias": "the adapter replaces biases; merge it into the model",
}

#: Parameters with a row for each token of the vocabulary.
_VOCABULARY_PARAMS: Final = frozenset({"embed.weight", "lm_head.weight"})

#: Names of parameters that stack the matrices of all experts, in the order of a module's parameters.
_STACKS: Final = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterPair:
    """A and B of a module, or of a parameter of a module.

    Attributes:
        name: name of the module or parameter, for messages and the config's patterns.
        destination: the model's parameters that the pair changes.
        a, b: the matrices in the file.
        is_stack: whether A and B stack the matrices of all experts.
        rank: rank of the matrices (in a stack, of each expert's matrices); 0 until `LayoutReader` sets it.
        scale: factor of the product B A; 1 until `LayoutReader` sets it.
    """

    name: str
    destination: Destination
    a: StoredTensor
    b: StoredTensor
    is_stack: bool = False
    rank: int = 0
    scale: float = 1.0


@dataclass(frozen=True)
class AdapterLayout:
    """Checked description of the files of an adapter, without the elements.

    Attributes:
        key: hash of the config's applied fields, the header and the file size; equal keys mean equal layouts.
        pairs: the matrices.
        elements: the range of the file that contains all matrices, as one tensor; None if the matrices differ in dtype
            or are not aligned.
    """

    key: bytes
    pairs: Sequence[AdapterPair]
    elements: StoredTensor | None

    @classmethod
    def of(cls, key: bytes, pairs: Sequence[AdapterPair]) -> AdapterLayout:
        """Return the layout of these matrices."""
        tensors = [tensor for pair in pairs for tensor in (pair.a, pair.b)]
        start, end = min(tensor.start for tensor in tensors), max(tensor.end for tensor in tensors)
        is_uniform = len({tensor.dtype for tensor in tensors}) == 1 and all(tensor.is_aligned for tensor in tensors)
        return cls(key, pairs, StoredTensor(tensors[0].dtype, (-1,), start, end) if is_uniform else None)


class LayoutReader:
    """Reader of the layouts of a model's adapters.

    Args:
        weight_names: names of the family's tensors, which adapters use, too.
        shapes: full shapes of all parameters of the model, by name.
        max_rank: maximum rank of a matrix.
        target_modules: last parts of the names of the modules that adapters may change; empty for all.
    """

    def __init__(
        self,
        weight_names: WeightNames,
        config: ModelConfig,
        shapes: Mapping[str, torch.Size],
        max_rank: int,
        target_modules: Iterable[str],
    ) -> None:
        self._weight_names, self._config, self._shapes = weight_names, config, shapes
        self._max_rank, self._allowed = max_rank, frozenset(target_modules)
        self._destinations: dict[str, Destination | None] = {}
        self._layouts: OrderedDict[bytes, AdapterLayout] = OrderedDict()

    def read(self, files: AdapterFiles) -> AdapterLayout:
        """Return the layout of an adapter's files.

        Raises:
            AdapterError: the files are damaged, inconsistent, or do not fit the model.
        """
        config = AdapterConfig.parse(files.config)
        key = hashlib.sha256(b"%d %s" % (len(files.tensors), config.key.encode() + files.header)).digest()
        if (known := self._layouts.get(key)) is not None:
            self._layouts.move_to_end(key)
            return known
        pairs = self._pairs(config, files.stored())
        if not pairs:
            raise AdapterError(f"{TENSORS} holds no matrices")
        self._check_targets(config, pairs)
        layout = AdapterLayout.of(key, [self._with_rank(config, pair) for pair in pairs])
        self._layouts[key] = layout
        if len(self._layouts) > MAX_LAYOUTS:
            self._layouts.popitem(last=False)
        return layout

    def _pairs(self, config: AdapterConfig, tensors: Mapping[str, StoredTensor]) -> list[AdapterPair]:
        """Return the tensors in pairs, without ranks and scales.

        Raises:
            AdapterError: a tensor is not supported, is no part of a pair, or has no parameter in the model.
        """
        halves: dict[tuple[str, int], dict[str, StoredTensor]] = {}
        for name, tensor in tensors.items():
            if len(name) > _MAX_NAME_CHARACTERS or not name.isprintable():
                raise AdapterError(f"{TENSORS} holds {name[:60]!r}, which is no name of a tensor")
            found = _TENSOR.fullmatch(name)
            if found is None and self._is_models_own(name, tensor):
                continue
            if found is None:
                reason = next((reason for end, reason in _FOREIGN.items() if name.endswith(end)), "it is no A or B")
                raise AdapterError(f"{TENSORS} holds {name[:200]!r}: {reason}")
            if not tensor.is_floating:
                raise AdapterError(f"{name} holds {tensor.dtype}, not floating-point numbers")
            depth = len(found["nested"]) // len(".base_layer")
            halves.setdefault((found["module"], depth), {})[found["half"] or found["embedding_half"]] = tensor
        depths: dict[str, int] = {}
        for module, depth in halves:
            depths[module] = max(depth, depths.get(module, 0))
        pairs = []
        for (module, depth), both in halves.items():
            if len(both) < 2:
                raise AdapterError(f"{TENSORS} holds only one of the two matrices of {module}")
            name, destination, is_stack = self._destination(config, module, depths[module] - depth)
            pairs.append(AdapterPair(name, destination, both["A"], both["B"], is_stack))
        return pairs

    def _is_models_own(self, name: str, tensor: StoredTensor) -> bool:
        """Whether the tensor belongs to the model's own embedding or head, which PEFT saves because tokens may have
        been added.

        Raises:
            AdapterError: its number of rows is not the model's.
        """
        found = _OWN.fullmatch(name)
        if found is None or not self._is_embedding_or_head(found["module"]):
            return False
        if tensor.shape[:1] != self._shapes["embed.weight"][:1]:
            raise AdapterError(
                f"{found['module']} has the shape {tensor.shape}, and the model has {self._config.vocab_size} tokens: "
                "tokens were added; merge the adapter into the model"
            )
        return True

    def _is_embedding_or_head(self, module: str) -> bool:
        destination = self._known(f"{module}.weight")
        return module in self._heads or (
            destination is not None and not _VOCABULARY_PARAMS.isdisjoint(destination.param_names)
        )

    def _destination(self, config: AdapterConfig, module: str, index: int) -> tuple[str, Destination, bool]:
        """Return the name, destination and `is_stack` of a pair of a module.

        Args:
            index: 0 for a module's own matrix. For stacked parameters of a module: index of the parameter among those
                that the adapter changes.

        Raises:
            AdapterError: the model has no such parameter.
        """
        destination = self._known(f"{module}.weight")
        if destination is not None and index == 0:
            return module, destination, False
        if module in self._heads and index == 0:  # also a head that shares the embedding's matrix
            return module, Destination(("lm_head.weight",)), False
        parameters = [f"{module}.{each}" for each in _STACKS]
        changed = [name for name in parameters if config.is_target_parameter(name)]
        if index < len(changed) and (destination := self._known(changed[index])) is not None:
            return changed[index], destination, True
        raise AdapterError(f"the model has no linear operation {module}, which the adapter changes")

    def _known(self, name: str) -> Destination | None:
        """Return the parameters that a checkpoint's tensor of that name belongs to; None if the model has none."""
        if name not in self._destinations:
            canonical = self._weight_names.canonical(name)
            self._destinations[name] = self._weight_names.destination(canonical, self._shapes, self._config)
            if len(self._destinations) > 4 * len(self._shapes) + 64:  # forget names that the model does not have
                self._destinations = {key: value for key, value in self._destinations.items() if value is not None}
                return self._weight_names.destination(canonical, self._shapes, self._config)
        return self._destinations[name]

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset({self._weight_names.names.get("lm_head", "lm_head"), "lm_head", "embed_out"})

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        """Names of the model's modules in checkpoints, grouped by the name with # in place of each number."""
        modules: dict[str, list[str]] = {}
        for param in self._shapes:
            stem, _, suffix = param.rpartition(".")
            module = self._weight_names.stored_in(stem) if suffix == "weight" else None
            if module is not None and module not in modules.setdefault(_shape(module), []):
                modules[_shape(module)].append(module)
        return modules

    def _check_targets(self, config: AdapterConfig, pairs: Iterable[AdapterPair]) -> None:
        """Check that the matrices in the file are those that the config names.

        A module that is named only by a pattern, or by "all-linear", needs no matrices if the file has none for any
        module whose name differs only in numbers (such as the same module of another layer).

        Raises:
            AdapterError: the config does not name a matrix's module, --lora-target-modules does not permit it, or
                matrices are missing.
        """
        present = {self._weight_names.canonical(f"{pair.name}.weight").removesuffix(".weight") for pair in pairs}
        for pair in pairs:
            is_target = config.is_target_parameter(f"{pair.name}.weight") or (
                config.is_target_parameter(pair.name) if pair.is_stack else config.targets(pair.name)
            )
            if not is_target or (config.targets_all_linear and self._is_embedding_or_head(pair.name)):
                raise AdapterError(f"{TENSORS} holds matrices of {pair.name}, which {FILE} does not name as a target")
            last = pair.name.rpartition(".")[2]
            if self._allowed and last not in self._allowed:
                raise AdapterError(
                    f"it changes {pair.name}, and --lora-target-modules permits {', '.join(sorted(self._allowed))}"
                )
        names = [pair.name for pair in pairs]
        listed = config.target_modules if not isinstance(config.target_modules, str) else ()
        for name in (*listed, *config.target_parameters):
            plain = name.removesuffix(".weight")
            if not config.excludes(plain) and not any(each == plain or each.endswith(f".{plain}") for each in names):
                raise AdapterError(f"{FILE} names {name[:200]!r} as a target, of which {TENSORS} holds no matrices")
        for shape in {_shape(module) for module in present}:
            expected = [module for module in self._modules.get(shape, ()) if config.targets(module)]
            if missing := [module for module in expected if module not in present]:
                raise AdapterError(f"{TENSORS} lacks the matrices of {some(missing)}, which {FILE} names as targets")

    def _with_rank(self, config: AdapterConfig, pair: AdapterPair) -> AdapterPair:
        """Return the pair with the rank and scale that the config states.

        Raises:
            AdapterError: the rank is larger than --max-lora-rank, or does not fit the shapes.
        """
        rank, scale = config.rank_and_scale(pair.name)
        if rank > self._max_rank:
            raise AdapterError(f"{pair.name} has rank {rank}; start the engine with --max-lora-rank {rank} or more")
        count = self._config.num_experts if pair.is_stack else 1
        a, b = pair.a.shape, pair.b.shape
        if len(a) != 2 or len(b) != 2 or a[0] != rank * count or b[1] != rank * count:
            ranks = f"rank {rank}" if count == 1 else f"rank {rank} of {count} experts"
            raise AdapterError(f"{pair.name} has matrices of {a} and {b}, which is not {ranks}")
        return replace(pair, rank=rank, scale=scale)


def _shape(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", module)
