"""Find the checkpoint that MODEL names: its files, config, loader and model card."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from stoker_common.errors import ArgumentError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.quantization.read import kv_cache_of
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder_loader import DecoderLoader
from stoker_engine.models.gguf.gguf_file import GGUFFile
from stoker_engine.models.hub.locate import locate_model
from stoker_engine.models.loading.kv_scales import LayerScales
from stoker_engine.models.loading.load_progress import OnProgress
from stoker_engine.models.loading.quantized_folder import QuantizedFolder
from stoker_engine.models.loading.safetensors_folder import SafetensorsFolder
from stoker_engine.models.model import Model
from stoker_engine.models.model_card import ModelCard, card_of_folder, card_of_gguf
from stoker_engine.models.model_folder import read_folder
from stoker_engine.quant.checkpoints.registry import FIND_MODULES
from stoker_engine.sizing.method_on_load import method_on_load
from stoker_engine.sizing.weight_formats import WeightFormats

logger = logging.getLogger(__name__)


class Loader(Protocol):
    """Loads the model of a checkpoint."""

    def load(
        self,
        config: ModelConfig,
        build: Build,
        device: torch.device,
        max_model_len: int,
        on_progress: OnProgress,
    ) -> Model:
        """Load the model, or this rank's shard of it.

        Args:
            max_model_len: maximum length of a sequence in tokens.
            on_progress: called while loading; see `OnProgress`.

        Raises:
            WeightsError: tensors are missing, unused, duplicated, not finite, or have the wrong shape.
            ModelError: the model is not supported, or not with the settings in `build`.
        """
        ...

    def weight_formats(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> WeightFormats:
        """Return the formats of the weights in memory, for a model of `dtype` on `device`. Does not load them."""
        ...

    def kv_scales(self, kv_cache_dtype: str, config: ModelConfig, build: Build) -> dict[int, LayerScales]:
        """Return the checkpoint's KV-cache scales that `kv_cache_dtype` uses, by layer (`models.loading.kv_scales`)."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model, and how to load it.

    Attributes:
        path: Hugging Face folder or GGUF file.
        method: quantization method that config.json states; empty if it states none, and for GGUF files.
    """

    path: Path
    config: ModelConfig
    card: ModelCard
    loader: Loader
    method: str = ""
    _formats: dict[tuple[torch.dtype, torch.device], WeightFormats] = field(default_factory=dict, compare=False)

    def load(
        self,
        build: Build,
        device: torch.device,
        max_model_len: int,
        on_progress: OnProgress = lambda done, total: None,
    ) -> Model:
        """See `Loader.load`."""
        return self.loader.load(self.config, build, device, max_model_len, on_progress)

    def weight_formats(self, dtype: torch.dtype, device: torch.device) -> WeightFormats:
        """See `Loader.weight_formats`."""
        known, key = self._formats, (dtype, device)
        if key not in known:  # cached: matching the names of a large mixture of experts takes seconds
            known[key] = self.loader.weight_formats(self.config, dtype, device)
        return known[key]

    def weights_stored_as(self, dtype: torch.dtype, device: torch.device) -> str:
        """Return the matrices' formats for messages, with the quantization method if there is one; `dtype` if no matrix
        is stored in blocks."""
        names = self.weight_formats(dtype, device).names or str(dtype).removeprefix("torch.")
        return f"{self.method} ({names})" if self.method else names

    def kv_scales(self, kv_cache_dtype: str, build: Build) -> dict[int, LayerScales]:
        """See `Loader.kv_scales`."""
        return self.loader.kv_scales(kv_cache_dtype, self.config, build)


def find_checkpoint(args: EngineArgs) -> Checkpoint:
    """Find MODEL: a folder, a GGUF file, ``demo://NAME`` or a hub id, which is downloaded.

    Raises:
        ModelError: the model cannot be found or read, or is not supported.
        ArgumentError: ``--revision`` for a model that is not from the hub, or ``--quantization`` or
            ``--batch-invariant`` for a checkpoint that does not support it.
    """
    path = locate_model(args)
    checkpoint = _gguf(path, args.quantization) if path.is_file() else _folder(path, args)
    if args.batch_invariant and not isinstance(checkpoint.loader, DecoderLoader):
        raise ArgumentError(
            "--batch-invariant",
            f"{checkpoint.config.architecture} runs on the Transformers backend, which lacks it; leave it out",
        )
    return checkpoint


def _gguf(path: Path, quantization: str | None) -> Checkpoint:
    gguf = GGUFFile(path)
    on_load = None if quantization == "gguf" else method_on_load(quantization, gguf.quantized_as())
    config = gguf.config()
    if dequantized := gguf.other_types():
        counts = ", ".join(f"{count} of type {name}" for name, count in sorted(dequantized.items()))
        logger.info("dequantizing tensors whose type has no kernel: %s", counts)
    return Checkpoint(path, config, card_of_gguf(gguf.field), DecoderLoader(gguf.weight_names(), gguf, on_load))


def _folder(path: Path, args: EngineArgs) -> Checkpoint:
    folder, card = read_folder(path, args.quantization), card_of_folder(path)
    config, quantization = folder.config, folder.quantization
    if config is None:
        # Imported only when needed: importing transformers' model classes takes seconds.
        from stoker_engine.models.transformers_backend.loader import TransformersLoader

        loader = TransformersLoader.of(path, folder.raw_config, args.trust_remote_code)
        return Checkpoint(path, loader.model_config(), card, loader)
    weight_names, weights = FAMILIES[config.architecture].weight_names, SafetensorsFolder(path)
    if quantization is None:
        return Checkpoint(path, config, card, DecoderLoader(weight_names, weights, folder.on_load))
    modules = FIND_MODULES[quantization.method](quantization, weights.tensors)
    kv_cache = kv_cache_of(folder.raw_config)
    quantized = DecoderLoader(weight_names, QuantizedFolder(weights, modules), kv_cache=kv_cache)
    return Checkpoint(path, config, card, quantized, quantization.method)
