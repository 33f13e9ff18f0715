"""Reads the matrices in adapters' folders and converts them to the dtype of the computation.

For a fused matrix of the checkpoint (such as queries, keys and values) a file has one A, and one B whose rows are split
like those of the fused matrix. Nothing in the files is executed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from stoker_common.errors import AdapterError, ArgumentError, WeightsError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.weight_layout import HalfSplitPairs, Split
from stoker_engine.architectures.weight_names import WeightNames
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.lora.adapter import Adapter, Factors
from stoker_engine.lora.adapter_files import AdapterFiles, AdapterFolders
from stoker_engine.lora.adapter_layout import AdapterLayout, AdapterPair, LayoutReader
from stoker_engine.lora.pace import Pace
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.decoder_loader import DecoderLoader
from stoker_engine.models.loading.apply_layout import apply_operation, split_fused
from stoker_engine.quant.weight_target import WeightTarget

logger = logging.getLogger(__name__)

#: Maximum size in bytes of a file of tensors beyond the tensors.
_MAX_HEADER_BYTES: Final = 16 << 20

#: Maximum number of elements checked between two calls of `Pace.give_way`.
_CHECKED_ELEMENTS: Final = 1 << 19


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter whose files have been read and whose layout has been checked.

    Attributes:
        files: content of the adapter's files.
        layout: names, shapes, ranks, scales and file positions of the matrices.
        is_scaled: whether the B matrices in `files` have been multiplied by their scales, in memory.
        is_plain: whether the matrices in `files` need no conversion: scaled, of the result's dtype, known to be finite.
    """

    folder: Path
    files: AdapterFiles
    layout: AdapterLayout
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
    """Reader of the adapters of one model.

    Args:
        weight_names: names of the family's tensors, which adapters use, too.
        shapes: full shapes of all parameters of the model, by name.
        max_rank: maximum rank of a matrix.
        target_modules: last parts of the names of the modules that adapters may change; empty for all.
        dtype: dtype of the resulting matrices.
        rounded_to: dtype to which the matrices are rounded first; None for `dtype`.
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
        self._config, self._shapes = config, shapes
        self._dtype, self._rounded_to = dtype, rounded_to or dtype
        # The limit is twice the size of A and B of all matrices in float32 at the maximum rank, plus the header and the
        # model's embedding and head, which PEFT saves with adapters of them.
        sizes = (sum(shape[-2:]) * max(1, shape[:-2].numel()) for shape in shapes.values() if len(shape) > 1)
        num_elements = 2 * max_rank * sum(sizes) + 2 * shapes["embed.weight"].numel()
        self._folders = AdapterFolders(4 * num_elements + _MAX_HEADER_BYTES)
        self._layouts = LayoutReader(weight_names, config, shapes, max_rank, target_modules)

    def read(self, folder: Path) -> Adapter:
        """Read an adapter's folder.

        Raises:
            AdapterError: the folder holds no adapter, is damaged, or does not fit the model.
        """
        pace = Pace()
        return self.adapter(self.open(folder, pace), pace)

    def open(self, folder: Path, pace: Pace) -> OpenedAdapter:
        """Read the files of an adapter's folder and check their layout; scale B in memory if no conversion is needed.

        Raises:
            AdapterError: see `read`.
        """
        files = self._folders.read(folder, pace)
        with _errors_of(folder):
            layout = self._layouts.read(files)
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
        """Return the matrices of an opened adapter. They share memory with `opened.files` where possible.

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

    def _of_pair(self, pair: AdapterPair, opened: OpenedAdapter) -> list[tuple[str, Factors]]:
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
            shape = self._shapes.get(name, self._shapes["embed.weight"])  # a head that shares the embedding's matrix
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

    def _parts(self, pair: AdapterPair, a: torch.Tensor, b: torch.Tensor) -> list[Factors]:
        """Return the factors of each parameter that a module's pair changes."""
        destination, rank = pair.destination, pair.rank
        for operation in destination.operations:
            if isinstance(operation, HalfSplitPairs):  # other operations change the matrix's columns, or vectors
                b = apply_operation(operation, b, self._config)
        if destination.fused is None:
            return [Factors(a, b)]
        shapes = [torch.Size((*self._shapes[name][:-1], rank)) for name in destination.param_names]
        targets = [WeightTarget(torch.empty(0), shape) for shape in shapes]
        parts = split_fused(replace(destination.fused, transposed=False), b, targets, self._config)
        return [Factors(a, part.contiguous()) for part in parts]

    def _parts_of_stack(self, pair: AdapterPair, a: torch.Tensor, b: torch.Tensor, rank: int) -> list[Factors]:
        """Return the factors of each expert's matrices, in the order of `pair.destination.param_names`."""
        fused = pair.destination.fused
        if fused is None or fused.split not in (Split.EXPERTS, Split.INTERLEAVED_EXPERTS):
            raise AdapterError(f"{pair.name} is stored in a layout that adapters cannot change")
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
        """Return the matrix scaled and converted to the dtype of the computation.

        Raises:
            AdapterError: an element is not finite after the conversion.
        """
        converted = stored if scale == 1.0 else stored.float() * scale
        converted = converted.to(self._rounded_to).to(self._dtype)
        # A sum is fast to compute, and finite only if all elements are. If large finite elements make the sum infinite,
        # the elements are checked one by one.
        if not torch.isfinite(converted.sum(dtype=torch.float32)) and not torch.isfinite(converted).all():
            raise AdapterError(
                f"the matrices of {name} hold nan or infinity, as {str(self._dtype).removeprefix('torch.')}"
            )
        return converted.contiguous()


@contextlib.contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """Add the folder's name to the message of an `AdapterError`."""
    try:
        yield
    except AdapterError as error:
        raise AdapterError(f"the adapter in {folder} cannot be served: {error}") from None


def _is_finite(elements: torch.Tensor, pace: Pace) -> bool:
    """Whether all elements are finite. May also be False for large finite elements, because their sum overflows."""
    for chunk in elements.split(_CHECKED_ELEMENTS):
        if not math.isfinite(chunk.sum()):
            return False
        pace.give_way()
    return True


def adapter_reader(checkpoint: Checkpoint, args: EngineArgs, dtype: torch.dtype) -> AdapterReader:
    """Return the reader of a model's adapters.

    Args:
        dtype: dtype of the computation.

    Raises:
        ArgumentError: the model runs on the Transformers backend, which does not support adapters.
    """
    if not isinstance(checkpoint.loader, DecoderLoader):
        raise ArgumentError(
            "--enable-lora",
            f"{checkpoint.config.architecture} runs on the Transformers backend, which does not support adapters; "
            "omit it",
        )
    return native_adapter_reader(checkpoint.config, args, dtype)


def native_adapter_reader(config: ModelConfig, args: EngineArgs, dtype: torch.dtype) -> AdapterReader:
    """Return the reader of the adapters of a model that does not run on the Transformers backend."""
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
