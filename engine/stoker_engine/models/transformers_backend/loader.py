"""Loader of models without a native family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils.logging import set_tqdm_hook

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
)
from stoker_engine.architectures.model_config import ModelConfig, eos_token_ids
from stoker_engine.architectures.own_modules import refuse_quantized
from stoker_engine.architectures.rope_config import RopeParameters, read_rope
from stoker_engine.contract.json_file import read_json_object
from stoker_engine.layers.build import Build
from stoker_engine.models.loading.kv_scales import LayerScales, is_kv_scale, kv_scales
from stoker_engine.models.loading.load_progress import LoadProgress, OnProgress
from stoker_engine.models.loading.safetensors_folder import SafetensorsFolder, not_floating
from stoker_engine.models.loading.weights import check_finite
from stoker_engine.models.transformers_backend.class_checks import cache_specs, check_class, model_class
from stoker_engine.models.transformers_backend.model import TransformersModel
from stoker_engine.models.transformers_backend.paged_attention import IMPLEMENTATION
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats


@dataclass(frozen=True)
class TransformersLoader:
    """Loader of a `TransformersModel`.

    Attributes:
        folder: Hugging Face folder with safetensors files.
        config: the folder's config.json as a transformers config.
        model: class of the model.
        trust_remote_code: whether the class is defined by code in the folder.
        eos_token_id: the end-of-sequence tokens that the folder's files state; None: those of `config`.
    """

    folder: Path
    config: PreTrainedConfig
    model: type[PreTrainedModel]
    trust_remote_code: bool
    eos_token_id: Any = None

    @classmethod
    def of(cls, folder: Path, given: Mapping[str, Any], trust_remote_code: bool) -> TransformersLoader:
        """Return the loader for `folder`.

        Args:
            given: parsed config.json of the folder.

        Raises:
            ModelError: the model is not supported; the message states why.
        """
        refuse_quantized(given)
        name = (given.get("architectures") or ["unknown"])[0]
        remote = (given.get("auto_map") or {}).get("AutoModelForCausalLM")
        if remote is None or not trust_remote_code:
            if given.get("model_type") not in CONFIG_MAPPING:
                raise ModelError(_unknown(name, given.get("model_type"), remote))
            config = CONFIG_MAPPING[given["model_type"]].from_dict(read_json_object(folder / "config.json"))
            return cls(folder, config, model_class(config, name), False, given.get("eos_token_id"))
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
        except OSError as error:  # for example a byte-order mark
            raise ModelError(f"transformers cannot read {folder / 'config.json'}: {error}") from error
        model = get_class_from_dynamic_module(remote, folder, local_files_only=True)
        check_class(model, config)
        return cls(folder, config, model, True, given.get("eos_token_id"))

    def model_config(self) -> ModelConfig:
        """Return the model's shape. Norms, activations and biases are placeholders."""
        given, config = self.config.to_dict(), self.config
        c = Fields(given, {})
        act = MLPConfig(getattr(config, "intermediate_size", None) or 4 * config.hidden_size, "")
        layers = []
        for spec in cache_specs(config, self.model):
            attention = AttentionConfig(
                num_heads=config.num_attention_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                value_head_dim=spec.value_head_dim,
                scale=spec.head_dim**-0.5,
                rope=_rope(c, spec.head_dim),
                sliding_window=spec.sliding_window,
            )
            layers.append(LayerConfig(attention, act))
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in self.model(config).parameters())
        end_tokens = config.eos_token_id if self.eos_token_id is None else self.eos_token_id
        return ModelConfig(
            architecture=self.model.__name__,
            model_type=str(config.model_type),
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            max_position_embeddings=int(config.max_position_embeddings),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            dtype=str(given.get("dtype") or given.get("torch_dtype") or "float32"),
            eos_token_ids=eos_token_ids(Fields({"eos_token_id": end_tokens}, {}), int(config.vocab_size)),
            decoder=DecoderConfig(NormConfig("rms", 0.0), tuple(layers)),
            num_weights=weights,
        )

    def weight_formats(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> WeightFormats:
        """See `models.checkpoint.Loader`."""
        return ALL_NUMBERS

    def kv_scales(self, kv_cache_dtype: str, config: ModelConfig, build: Build) -> dict[int, LayerScales]:
        """See `models.checkpoint.Loader`."""
        return kv_scales(kv_cache_dtype, SafetensorsFolder(self.folder), config, build)

    def load(
        self,
        config: ModelConfig,
        build: Build,
        device: torch.device,
        max_model_len: int,
        on_progress: OnProgress,
    ) -> TransformersModel:
        """See `models.checkpoint.Loader`."""
        if build.ranks.size > 1:
            raise ModelError(
                f"{config.architecture} runs on the Transformers backend, which cannot be split over "
                f"{build.ranks.size} ranks; leave out --tensor-parallel-size"
            )
        if build.extend is not None or build.hidden_after or not build.has_head:
            raise ModelError(
                f"{config.architecture} runs on the Transformers backend, which supports neither adapters nor "
                "intermediate hidden states"
            )
        try:
            with _watched(LoadProgress(on_progress)):
                loaded: Any = self.model.from_pretrained(
                    self.folder,
                    config=self.config,
                    dtype=build.dtype,
                    attn_implementation=IMPLEMENTATION,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except (OSError, RuntimeError, ValueError) as error:
            raise WeightsError(f"cannot read the weights in {self.folder}: {error}") from error
        model, report = loaded
        for what, names in (
            ("lack tensors that the model needs", report["missing_keys"]),
            (
                "contain tensors that the model does not use",
                {n for n in report["unexpected_keys"] if not is_kv_scale(n)},
            ),
            ("contain tensors of the wrong shape", report["mismatched_keys"]),
        ):
            if names:
                raise WeightsError(
                    f"the weights {what}: {', '.join(sorted(map(str, names))[:5])} ({len(names)} in all)"
                )
        model = model.to(device).eval()
        self._check_weights(dict(model.named_parameters()))
        return TransformersModel(config, model, build.backend, max_model_len)

    def _check_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Check for integer or non-finite weights, which transformers accepts silently."""
        for name, dtype in SafetensorsFolder(self.folder).not_floating().items():
            if name in weights or f"{self.model.base_model_prefix}.{name}" in weights:
                raise not_floating(name, dtype)
        for name, tensor in weights.items():
            check_finite(name, tensor)


@contextmanager
def _watched(progress: LoadProgress) -> Iterator[None]:
    """Report each step of transformers' progress bars as progress."""

    def ticking(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            progress.tick()
            yield item

    def hook(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not args:
            return bar(**options)
        total = options.pop("total", None) or (len(args[0]) if hasattr(args[0], "__len__") else None)
        return bar(ticking(args[0]), *args[1:], total=total, **options)

    before = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _unknown(architecture: str, model_type: object, remote: str | None) -> str:
    if remote is not None:
        return (
            f"{architecture} needs its own Python code ({remote}), which is not run by default; "
            "review it, then allow it with --trust-remote-code"
        )
    return (
        f"{architecture} (model type {model_type!r}) is supported neither by Stoker nor by "
        f"transformers {transformers_version}; try a newer version of transformers"
    )


def _rope(c: Fields, head_dim: int) -> RopeParameters | None:
    """Return the rotary parameters, or None if those of the config are invalid or unsupported."""
    try:
        return read_rope(c, head_dim)
    except ModelError:
        return None
