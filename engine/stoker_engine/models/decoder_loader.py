"""Loader for natively supported families: builds a `Decoder` and fills it with a checkpoint's weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.stored_formats import Code, GroupFormat, StoredFormat
from stoker_engine.architectures.weight_names import WeightNames
from stoker_engine.kernels.w8a8_linear import MULTIPLE
from stoker_engine.kernels.w8a8_panels import row_format
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.loading.kv_scales import LayerScales, kv_scales
from stoker_engine.models.loading.load_progress import LoadProgress, OnProgress
from stoker_engine.models.loading.quantized_on_load import QuantizedOnLoad
from stoker_engine.models.loading.stored_weights import stored_weights, with_formats
from stoker_engine.models.loading.weight_source import Part, WeightSource
from stoker_engine.models.loading.weights import load_weights
from stoker_engine.parallel.huge_pages import collapse_pages, use_huge_pages
from stoker_engine.quant.blocks import BlockMatrix
from stoker_engine.quant.prepack import Packable
from stoker_engine.quant.weight_target import WeightTarget
from stoker_engine.sizing.pipeline_stages import Stage
from stoker_engine.sizing.planned_formats import on_load_formats
from stoker_engine.sizing.weight_formats import WeightFormats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecoderLoader:
    """Loader of a `Decoder`.

    Attributes:
        weight_names: map from the files' tensor names to parameters.
        weights: tensors of the checkpoint.
        on_load: method of `ON_LOAD` by which matrices are quantized while loading; None: no quantization.
        kv_cache: see `architectures.quantization.read.kv_cache_of`.
    """

    weight_names: WeightNames
    weights: WeightSource
    on_load: str | None = None
    kv_cache: str = ""

    def load(
        self,
        config: ModelConfig,
        build: Build,
        device: torch.device,
        max_model_len: int,
        on_progress: OnProgress,
    ) -> Decoder:
        """See `models.checkpoint.Loader`."""
        formats = self.weight_formats(config, build.dtype, device)
        build = replace(build, linear=with_formats(formats, build.linear))
        with torch.inference_mode():
            with device:
                model = Decoder(config, build, max_model_len)
            use_huge_pages(model.parameters())
            weights = self.weights if self.on_load is None else QuantizedOnLoad(self.weights, device)
            progress = LoadProgress(on_progress)
            is_part = build.stage.count > 1 or not build.has_head
            elsewhere = _params_of_whole_model(config, build) if is_part else frozenset[str]()
            load_weights(model, _Watched(weights, progress), self.weight_names, progress, elsewhere)
            settle(model)
            collapse_pages(model.parameters())
        return model

    def weight_formats(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> WeightFormats:
        """See `models.checkpoint.Loader`."""
        formats = stored_weights(self.weights, self.weight_names, config, dtype, device)
        if self.on_load is None:
            return formats
        return formats.replaced(on_load_formats(config, self.on_load, on_cpu=device.type == "cpu"))

    def kv_scales(self, kv_cache_dtype: str, config: ModelConfig, build: Build) -> dict[int, LayerScales]:
        """See `models.checkpoint.Loader`."""
        return kv_scales(kv_cache_dtype, self.weights, config, build, self.kv_cache)


def settle(model: Decoder) -> None:
    """Prepack the loaded weights, let norms and activations quantize their results, and fuse layers."""
    packed = [module for module in model.modules() if isinstance(module, Packable)]
    for module in packed:
        module.pack()
    blocks = [module for module in model.modules() if isinstance(module, BlockMatrix)]
    _log_quantized_activations(blocks, "fp8_e4m3", "FP8", "; --fp8-weight-only disables this")
    _log_quantized_activations(blocks, "int8", "INT8", "")
    if any(each.rounds_activations for each in blocks):
        logger.info("GEMMs with block-quantized weights round activations to 8 bits; --dtype float32 disables this")
    model.quantize_early()
    model.fuse()


def _log_quantized_activations(blocks: Sequence[BlockMatrix], code: Code, name: str, remedy: str) -> None:
    """Log how many of the matrices with `code` whose checkpoint permits quantized activations are multiplied with
    such activations, and why the others are not."""
    matrices = [
        (each, each.stored)
        for each in blocks
        if isinstance(each.stored, GroupFormat) and each.stored.quantized_activations and each.stored.code == code
    ]
    others = [(each, stored) for each, stored in matrices if each.row_format is None]
    if len(others) < len(matrices):
        num_quantizing = len(matrices) - len(others)
        logger.info(
            "%d of %d %s matrices are multiplied with activations quantized to %s%s",
            num_quantizing,
            len(matrices),
            name,
            name,
            remedy,
        )
        if reasons := {_why_unquantized(*each) for each in others}:
            logger.info("the activations of %d are not quantized: %s", len(others), "; ".join(sorted(reasons)[:3]))
    elif others and not any(each.rounds_activations for each, _ in others):
        logger.info("%s weights are multiplied with unquantized activations", name)


def _why_unquantized(matrix: BlockMatrix, stored: GroupFormat) -> str:
    if row_format(stored, matrix.inner) is None:
        return f"no kernel for {stored.name} with scales in {stored.scale}"
    rows, inner = matrix.blocks.shape[-2], matrix.inner
    if rows % MULTIPLE or inner % MULTIPLE:
        return f"{rows} rows of {inner} columns, of which one is no multiple of {MULTIPLE}"
    return "those of the experts' other matrices are not"


def _params_of_whole_model(config: ModelConfig, build: Build) -> frozenset[str]:
    """Return the parameter names of all pipeline stages and the head, from a model on the meta device."""
    with torch.device("meta"):
        whole = replace(build, stage=Stage(), has_head=True, extend=None)
        return frozenset(Decoder(config, whole, max_model_len=1).weight_targets())


@dataclass(frozen=True)
class _Watched:
    """A weight source that reports progress at each read, since a tensor may be read in many parts."""

    source: WeightSource
    progress: LoadProgress

    def names(self) -> list[str]:
        """See `WeightSource`."""
        return self.source.names()

    def shape(self, name: str) -> torch.Size:
        """See `WeightSource`."""
        return self.source.shape(name)

    def stored(self, name: str) -> StoredFormat | None:
        """See `WeightSource`."""
        return self.source.stored(name)

    def read(self, name: str, part: Part | None = None, stored: StoredFormat | None = None) -> torch.Tensor:
        """See `WeightSource`."""
        self.progress.tick()
        return self.source.read(name, part, stored)

    def read_into(self, name: str, target: WeightTarget) -> None:
        """See `WeightSource`."""
        self.progress.tick()
        self.source.read_into(name, target)
