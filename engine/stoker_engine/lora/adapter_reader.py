"""Reads an adapter from PEFT's files, and checks it against the model.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [rank, inputs]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [outputs, rank]
    base_model.model.model.embed_tokens.lora_embedding_A, _B            [rank, vocabulary], [width, rank]
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight, …     of a parameter that stacks experts:
                                                      [experts × rank, inputs], [outputs, rank × experts]

Modules are called as the family's files call them, so the names lead to our parameters as a checkpoint's do. What such
a file holds as one matrix has one A, and its B is taken apart as the matrix is. Every tensor finds its place, or the
adapter is refused; nothing in the files is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import torch

from stoker_common.errors import AdapterError, ArgumentError, WeightsError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.weight_layout import HalfSplitPairs, Split
from stoker_engine.architectures.weight_names import Destination, WeightNames
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.lora.adapter import Adapter, Factors
from stoker_engine.lora.adapter_config import FILE, AdapterConfig
from stoker_engine.lora.adapter_files import TENSORS, AdapterFiles, AdapterFolders, StoredTensor
from stoker_engine.lora.pace import Pace
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.decoder_loader import DecoderLoader
from stoker_engine.models.loading.apply_layout import apply_operation, split_fused
from stoker_engine.models.loading.weight_source import some
from stoker_engine.quant.weight_target import WeightTarget

logger = logging.getLogger(__name__)

#: Of the file of tensors, beside the tensors.
_MAX_HEADER_BYTES: Final = 16 << 20

_MAX_NAME_CHARACTERS: Final = 500

#: Elements that are checked between two pauses.
_CHECKED_ELEMENTS: Final = 1 << 19

#: Layouts of files whose checks are remembered. Adapters of one team mostly have the same.
_MAX_LAYOUTS: Final = 16

_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)(?P<nested>(\.base_layer)*)"
    r"\.(?:lora_(?P<half>[AB])\.weight|lora_embedding_(?P<embedding_half>[AB]))"
)
_OWN = re.compile(r"base_model\.model\.(?P<module>(?:.+\.)?\w+)\.base_layer\.(?:weight|bias)")
#: Ends of tensors' names that mean what is not served.
_FOREIGN: Final = {
    ".lora_magnitude_vector": "DoRA scales the model's own matrices; merge it into the model",
    ".lora_B.bias": "B has a bias",
    ".weight": "it has whole modules of its own; merge it into the model",
    ".bias": "it has biases of its own; merge it into the model",
}

#: What parameters with all experts' matrices are called, in the order in which a module has them.
_STACKS: Final = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class _Pair:
    """A and B of one module, or of one of its parameters.

    Attributes:
        name: of the module or parameter, for messages and for the config's patterns.
        destination: the parameters of ours that they change.
        is_stack: they are those of all experts.
        rank: of the matrices; of all experts', of each.
        scale: what their product is multiplied by.
    """

    name: str
    destination: Destination
    a: StoredTensor
    b: StoredTensor
    is_stack: bool = False
    rank: int = 0
    scale: float = 1.0


@dataclass(frozen=True)
class _Layout:
    """Checked description of the files of an adapter, without the elements.

    Attributes:
        key: hash that is equal for adapters of equal layout.
        pairs: the matrices.
        elements: the range of the file that contains all matrices, as one tensor; None if the matrices differ in dtype
            or are not aligned.
    """

    key: bytes
    pairs: Sequence[_Pair]
    elements: StoredTensor | None

    @classmethod
    def of(cls, key: bytes, pairs: Sequence[_Pair]) -> _Layout:
        """Return the layout of these matrices."""
        tensors = [tensor for pair in pairs for tensor in (pair.a, pair.b)]
        start, end = min(tensor.start for tensor in tensors), max(tensor.end for tensor in tensors)
        is_uniform = len({tensor.dtype for tensor in tensors}) == 1 and all(tensor.is_aligned for tensor in tensors)
        return cls(key, pairs, StoredTensor(tensors[0].dtype, (-1,), start, end) if is_uniform else None)


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter whose files have been read and whose layout has been checked.

    Attributes:
        folder: the adapter's folder.
        files: content of its files.
        layout: names, shapes and places of the matrices.
        is_scaled: whether the B matrices in `files` are multiplied by their scales.
        is_plain: whether the matrices in `files` are those to compute with: scaled, finite, and of the model's dtype.
    """

    folder: Path
    files: AdapterFiles
    layout: _Layout
    is_scaled: bool
    is_plain: bool

    @property
    def digest(self) -> str:
        """Digest of the files."""
        return self.files.digest

    @property
    def key(self) -> bytes:
        """Hash of the layout."""
        return self.layout.key

    @property
    def rank(self) -> int:
        """Largest rank of the matrices."""
        return max(pair.rank for pair in self.layout.pairs)


class AdapterReader:
    """Reads adapters of one model.

    Args:
        weight_names: how files of the family, and so adapters' authors, call its modules.
        config: the model's.
        shapes: of all its parameters, whatever part of them is here.
        max_rank: of a matrix.
        target_modules: the last parts of the names of the modules that may be changed; empty: all.
        dtype: of the matrices.
        rounded_to: what they are rounded to before.
    """

    def __init__(
        self,
        weight_names: WeightNames,
        config: ModelConfig,
        shapes: Mapping[str, torch.Size],
        *,
        max_rank: int,
        target_modules: tuple[str, ...],
        dtype: torch.dtype,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        self._weight_names, self._config, self._shapes = weight_names, config, shapes
        self._max_rank, self._allowed = max_rank, frozenset(target_modules)
        self._dtype, self._rounded_to = dtype, rounded_to or dtype
        self._destinations: dict[str, Destination | None] = {}
        self._folders = AdapterFolders(self._max_bytes)
        self._layouts: OrderedDict[bytes, _Layout] = OrderedDict()

    def read(self, folder: Path) -> Adapter:
        """Read an adapter's folder.

        Raises:
            AdapterError: the folder holds no adapter, is damaged, or does not fit the model.
        """
        pace = Pace()
        return self.adapter(self.open(folder, pace), pace)

    def open(self, folder: Path, pace: Pace) -> OpenedAdapter:
        """Read the files of an adapter's folder and check everything but the elements.

        Raises:
            AdapterError: see `read`.
        """
        files = self._folders.read(folder, pace)
        with _errors_of(folder):
            layout = self._layout(files)
        if not files.is_known and (folder / "chat_template.jinja").exists():
            logger.warning("%s is ignored: chats use the model's own template", folder / "chat_template.jinja")
        elements, is_plain = layout.elements, False
        if is_scaled := elements is not None and elements.torch_dtype == self._dtype == self._rounded_to:
            for pair in layout.pairs:
                if pair.scale != 1.0:
                    pair.b.of(files.tensors).mul_(pair.scale)
            is_plain = _is_finite(elements.of(files.tensors), pace)
        return OpenedAdapter(folder, files, layout, is_scaled, is_plain)

    def adapter(self, opened: OpenedAdapter, pace: Pace) -> Adapter:
        """Return the matrices. They share the content's memory where possible.

        Raises:
            AdapterError: see `read`.
        """
        factors = dict[str, Factors]()
        with _errors_of(opened.folder):
            for pair in opened.layout.pairs:
                for name, each in self._of_pair(pair, opened):
                    if name in factors:
                        raise AdapterError(f"{pair.name} is changed twice")
                    factors[name] = each
                pace.give_way()
        return Adapter(factors, opened.digest)

    def _layout(self, files: AdapterFiles) -> _Layout:
        """Return the checked layout of the files."""
        config = AdapterConfig.parse(files.config)
        key = hashlib.sha256(b"%d %s" % (len(files.tensors), config.key.encode() + files.header)).digest()
        if (known := self._layouts.get(key)) is not None:
            self._layouts.move_to_end(key)
            return known
        pairs = self._pairs(config, files.stored())
        if not pairs:
            raise AdapterError(f"{TENSORS} holds no matrices")
        self._check_targets(config, pairs)
        layout = _Layout.of(key, [self._with_rank(config, pair) for pair in pairs])
        self._layouts[key] = layout
        if len(self._layouts) > _MAX_LAYOUTS:
            self._layouts.popitem(last=False)
        return layout

    def _pairs(self, config: AdapterConfig, tensors: Mapping[str, StoredTensor]) -> list[_Pair]:
        """The tensors, two by two."""
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
            pairs.append(_Pair(name, destination, both["A"], both["B"], is_stack))
        return pairs

    def _is_models_own(self, name: str, tensor: StoredTensor) -> bool:
        """Whether it is the embedding's or head's own matrix, which PEFT writes too, in case that tokens were added."""
        if (found := _OWN.fullmatch(name)) is None:
            return False
        if tensor.shape[:1] != self._shapes["embed.weight"][:1]:
            raise AdapterError(
                f"{found['module']} has {tensor.shape[:1]} rows, the model's {self._config.vocab_size}: tokens "
                "were added; merge the adapter into the model"
            )
        return True

    def _destination(self, config: AdapterConfig, module: str, index: int) -> tuple[str, Destination, bool]:
        """What a module, or the parameter with this index of those that are changed of it, is in our model."""
        destination = self._known(f"{module}.weight")
        if destination is not None and index == 0:
            return module, destination, False
        if module in self._heads and index == 0:  # its own names, and that of a head that is the embedding
            return module, Destination(("lm_head.weight",)), False
        parameters = [f"{module}.{each}" for each in _STACKS]
        changed = [name for name in parameters if config.is_target_parameter(name)]
        if index < len(changed) and (destination := self._known(changed[index])) is not None:
            return changed[index], destination, True
        raise AdapterError(f"the model has no linear operation {module}, which the adapter changes")

    def _known(self, name: str) -> Destination | None:
        if name not in self._destinations:
            canonical = self._weight_names.canonical(name)
            self._destinations[name] = self._weight_names.destination(canonical, self._shapes, self._config)
            if len(self._destinations) > 4 * len(self._shapes) + 64:  # names that the model does not have
                self._destinations = {key: value for key, value in self._destinations.items() if value is not None}
                return self._weight_names.destination(canonical, self._shapes, self._config)
        return self._destinations[name]

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset({self._weight_names.names.get("lm_head", "lm_head"), "lm_head", "embed_out"})

    @cached_property
    def _max_bytes(self) -> int:
        """More than the tensors of any adapter of these ranks take, in float32."""
        sizes = (sum(shape[-2:]) * max(1, shape[:-2].numel()) for shape in self._shapes.values() if len(shape) > 1)
        return 4 * 2 * self._max_rank * sum(sizes) + _MAX_HEADER_BYTES

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        """The names of the model's modules, by the name with # for its numbers."""
        modules: dict[str, list[str]] = {}
        for param in self._shapes:
            stem, _, suffix = param.rpartition(".")
            module = self._weight_names.stored_in(stem) if suffix == "weight" else None
            if module is not None and module not in modules.setdefault(_shape(module), []):
                modules[_shape(module)].append(module)
        return modules

    def _check_targets(self, config: AdapterConfig, pairs: Iterable[_Pair]) -> None:
        """Whether the files hold what the config says: no more, and no less."""
        present = {self._weight_names.canonical(f"{pair.name}.weight").removesuffix(".weight") for pair in pairs}
        for pair in pairs:
            is_target = config.is_target_parameter(f"{pair.name}.weight") or (
                config.is_target_parameter(pair.name) if pair.is_stack else config.targets(pair.name)
            )
            if not is_target:
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

    def _with_rank(self, config: AdapterConfig, pair: _Pair) -> _Pair:
        rank, scale = config.rank_and_scale(pair.name)
        if rank > self._max_rank:
            raise AdapterError(f"{pair.name} has rank {rank}; start the engine with --max-lora-rank {rank} or more")
        count = self._config.num_experts if pair.is_stack else 1
        a, b = pair.a.shape, pair.b.shape
        if len(a) != 2 or len(b) != 2 or a[0] != rank * count or b[1] != rank * count:
            ranks = f"rank {rank}" if count == 1 else f"rank {rank} of {count} experts"
            raise AdapterError(f"{pair.name} has matrices of {a} and {b}, which is not {ranks}")
        return replace(pair, rank=rank, scale=scale)

    def _of_pair(self, pair: _Pair, opened: OpenedAdapter) -> list[tuple[str, Factors]]:
        """Return the factors of each parameter that the pair changes, by name without ``.weight``."""
        shapes, rank, content = (pair.a.shape, pair.b.shape), pair.rank, opened.files.tensors
        a, b = pair.a.of(content), pair.b.of(content)
        if not opened.is_plain:
            a = self._converted(pair.name, a, 1.0)
            b = self._converted(pair.name, b, 1.0 if opened.is_scaled else pair.scale)
        try:
            parts = self._parts_of_stack(pair, a, b, rank) if pair.is_stack else self._parts(pair, a, b)
        except (WeightsError, RuntimeError, IndexError, ValueError) as error:
            raise AdapterError(f"{pair.name} has matrices of {shapes[0]} and {shapes[1]}: {error}") from None
        found = []
        for name, part in zip(pair.destination.param_names, parts, strict=True):
            stem = name.removesuffix(".weight")
            shape = self._shapes.get(name, self._shapes["embed.weight"])  # a head that is the embedding
            expected = (*part.b.shape[:-1], part.a.shape[1])
            if stem == "embed":
                expected = (part.a.shape[1], part.b.shape[0])
            if tuple(shape) != expected:
                raise AdapterError(
                    f"{pair.name} has matrices of {shapes[0]} and {shapes[1]}, and the model needs them for "
                    f"{tuple(shape)}; it was trained on another model"
                )
            found.append((stem, part))
        return found

    def _parts(self, pair: _Pair, a: torch.Tensor, b: torch.Tensor) -> list[Factors]:
        destination, rank = pair.destination, pair.rank
        for operation in destination.operations:
            if isinstance(operation, HalfSplitPairs):  # others are about columns, which B has none of, or about vectors
                b = apply_operation(operation, b, self._config)
        if destination.fused is None:
            return [Factors(a, b)]
        shapes = [torch.Size((*self._shapes[name][:-1], rank)) for name in destination.param_names]
        targets = [WeightTarget(torch.empty(0), shape) for shape in shapes]
        parts = split_fused(replace(destination.fused, transposed=False), b, targets, self._config)
        return [Factors(a, part.contiguous()) for part in parts]

    def _parts_of_stack(self, pair: _Pair, a: torch.Tensor, b: torch.Tensor, rank: int) -> list[Factors]:
        """Of each expert's matrices, in the order of the parameters."""
        fused = pair.destination.fused
        if fused is None or fused.split not in (Split.EXPERTS, Split.INTERLEAVED_EXPERTS):
            raise AdapterError(f"{pair.name} is held in a way that adapters cannot change here")
        count = self._config.num_experts
        each = len(pair.destination.param_names) // count
        a_of, b_of = a.view(count, rank, -1), b.view(len(b), rank, count).permute(2, 0, 1)
        parts = []
        for expert_a, expert_b in zip(a_of, b_of, strict=True):
            if fused.split is Split.INTERLEAVED_EXPERTS:
                rows = [expert_b[part::each] for part in range(each)]
            else:
                rows = list(expert_b.chunk(each))
            parts += [Factors(expert_a, part.contiguous()) for part in rows]
        return parts

    def _converted(self, name: str, stored: torch.Tensor, scale: float) -> torch.Tensor:
        converted = stored if scale == 1.0 else stored.float() * scale
        converted = converted.to(self._rounded_to).to(self._dtype)
        # A finite sum needs finite elements, and is fast to compute. Large finite elements may have an infinite sum.
        if not torch.isfinite(converted.sum(dtype=torch.float32)) and not torch.isfinite(converted).all():
            raise AdapterError(
                f"the matrices of {name} hold nan or infinity, as {str(self._dtype).removeprefix('torch.')}"
            )
        return converted.contiguous()


@contextlib.contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """Name the folder in errors."""
    try:
        yield
    except AdapterError as error:
        raise AdapterError(f"the adapter in {folder} cannot be served: {error}") from None


def _is_finite(elements: torch.Tensor, pace: Pace) -> bool:
    """Whether all elements are known to be finite. Large finite elements may be reported as not known."""
    for chunk in elements.split(_CHECKED_ELEMENTS):
        if not math.isfinite(chunk.sum()):
            return False
        pace.give_way()
    return True


def adapter_reader(checkpoint: Checkpoint, args: EngineArgs, dtype: torch.dtype) -> AdapterReader:
    """A reader of adapters of a model that is computed in `dtype`.

    Raises:
        ArgumentError: adapters of such a model are not served.
    """
    if not isinstance(checkpoint.loader, DecoderLoader):
        raise ArgumentError(
            "--enable-lora",
            f"{checkpoint.config.architecture} runs by transformers' own modules, beside which no adapters are served; "
            "leave it out",
        )
    return native_adapter_reader(checkpoint.config, args, dtype)


def native_adapter_reader(config: ModelConfig, args: EngineArgs, dtype: torch.dtype) -> AdapterReader:
    """The same of a model that our own modules compute."""
    with torch.device("meta"):
        model = Decoder(config, Build(dtype, SdpaBackend(), REFERENCE), max_model_len=1)
    return AdapterReader(
        FAMILIES[config.architecture].weight_names,
        config,
        {name: target.full_shape for name, target in model.weight_targets().items()},
        max_rank=args.max_lora_rank,
        target_modules=args.lora_target_modules,
        dtype=dtype,
        rounded_to=None if args.lora_dtype == "auto" else getattr(torch, args.lora_dtype),
    )


def _shape(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", module)
