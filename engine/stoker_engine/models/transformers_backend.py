"""Decoders that no family here describes, run by transformers' own modules on our paged attention.

transformers' models call attention through an interface, by the name of an implementation. Ours is one more: it keeps
keys and values in the paged cache and lets an `AttentionBackend` attend. The batch goes in as one flat sequence
[1, tokens] whose positions say where each token stands; nothing but attention looks at other tokens.

    decoder      token ids, positions → hidden states, normalised        (`TransformersModel.forward`)
    what follows hidden states → logits: head, scale, cap …              (`TransformersModel.logits`)

What a model does inside cannot be read off its config alone. So a first token is run before any request is served,
and whatever our attention would not compute as the model means it is refused by name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import set_tqdm_hook

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
)
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.architectures.own_modules import refuse_quantized
from stoker_engine.architectures.rope_config import RopeParameters, read_rope
from stoker_engine.attention.backend import AttentionBackend, AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.contract.json_file import read_json_object
from stoker_engine.layers.build import Build
from stoker_engine.models.loading.kv_scales import LayerScales, is_kv_scale, kv_scales
from stoker_engine.models.loading.load_progress import LoadProgress, OnProgress
from stoker_engine.models.loading.safetensors_folder import SafetensorsFolder, not_floating
from stoker_engine.models.loading.weights import check_finite
from stoker_engine.models.model import StepInputs
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats

logger = logging.getLogger(__name__)

#: The name under which transformers' models find our attention.
IMPLEMENTATION: Final = "stoker_paged"

#: What models hand to the attention interface and we compute, or need not look at.
_UNDERSTOOD: Final = frozenset(
    {"scaling", "sliding_window", "softcap", "dropout", "is_causal", "position_ids", "position_embeddings"}
)
_WINDOWS: Final = {"full_attention": False, "attention": False, "sliding_attention": True}


def model_class(config: PreTrainedConfig, architecture: str) -> type[PreTrainedModel]:
    """transformers' class for `architecture`.

    Raises:
        ModelError: it is no decoder, or not one that runs on our attention; the message says why.
    """
    if config.is_encoder_decoder:
        raise ModelError(f"{architecture} is an encoder-decoder; this engine serves decoder-only language models")
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise ModelError(
                f"{architecture} is a multimodal model ({part}) whose text decoder is not served by itself; "
                "use the family's text-only model"
            )
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # Code of the hub and transformers may write one name in two ways: PhiMoEForCausalLM, PhimoeForCausalLM.
    if cls is None or cls.__name__.lower() != architecture.lower():
        raise ModelError(f"{architecture} is no causal language model; this engine serves autoregressive decoders")
    check_class(cls, config)
    model: type[PreTrainedModel] = cls
    return model


def check_class(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuses classes that attend in ways of their own.

    Raises:
        ModelError: says why.
    """
    recurrent = sorted(set(getattr(config, "layer_types", None) or ()) - set(_WINDOWS))
    if recurrent:
        raise ModelError(f"{cls.__name__} has {', '.join(recurrent)} layers; only full and sliding attention is served")
    if getattr(cls, "_is_stateful", False):
        raise ModelError(f"{cls.__name__} keeps a recurrent state; only models that attend to a KV cache are served")
    if not cls.is_backend_compatible():
        raise ModelError(
            f"{cls.__name__} does not support transformers' attention interface, so it cannot run on the paged cache"
        )


def cache_specs(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> list[CacheSpec]:
    """What each layer keeps, as far as the config states it; `TransformersModel` proves it.

    Windows: ``layer_types`` says which layers have one; without it all do, if the model's code ever makes such a mask.
    """
    heads = config.num_attention_heads
    kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    value_head_dim = head_dim
    if getattr(config, "kv_lora_rank", None):  # latent attention: transformers attends with the heads made from it
        kv_heads, head_dim = heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        value_head_dim = config.v_head_dim
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = window is not None and hasattr(sys.modules[cls.__module__], "create_sliding_window_causal_mask")
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    return [CacheSpec(kv_heads, head_dim, value_head_dim, window if _WINDOWS[kind] else None) for kind in kinds]


class TransformersModel(nn.Module):
    """One of transformers' causal language models, as a `Model`.

    Args:
        language_model: loaded, on its device, made with attention implementation `IMPLEMENTATION`.
        max_model_len: longest sequence; rotary embeddings that depend on the length are fixed for it.

    Raises:
        ModelError: its attention asks for something that we do not compute.
    """

    def __init__(
        self, config: ModelConfig, language_model: PreTrainedModel, backend: AttentionBackend, max_model_len: int
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        specs = [layer.attention.cache for layer in config.layers]
        logger.info("%s runs by transformers' own modules, which are slower than native ones", config.architecture)
        self.decoder = language_model.base_model
        self.head = language_model
        setattr(language_model, language_model.base_model_prefix, _Given())
        self._step = _Step()
        self._layers = [_PagedLayer(index, spec, backend, self._step) for index, spec in enumerate(specs)]
        for module in self.decoder.modules():
            if isinstance(index := getattr(module, "layer_idx", None), int) and index < len(specs):
                module.stoker_layer = self._layers[index]  # type: ignore[assignment]
            _fix_rotary(module, max_model_len)
        self._rehearse(specs)

    def forward(self, inputs: StepInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        assert hidden is None, "a model of transformers is whole"
        self._step.inputs = inputs
        out = self.decoder(
            input_ids=inputs.token_ids.unsqueeze(0), position_ids=inputs.positions.unsqueeze(0), use_cache=False
        )
        self._step.inputs = None
        last: torch.Tensor = out.last_hidden_state[0]
        return last if inputs.rows is None else last[inputs.rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        logits: torch.Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    def _rehearse(self, specs: list[CacheSpec]) -> None:
        """Runs one token on caches of one block."""
        parameter = next(self.decoder.parameters())
        options: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
        windows = list(dict.fromkeys(spec.sliding_window for spec in specs))
        caches = []
        for spec in specs:
            key = torch.zeros(1, 1, spec.num_kv_heads, spec.head_dim, **options)
            value = torch.zeros(1, 1, spec.num_kv_heads, spec.value_head_dim, **options)
            caches.append(KVCache(key, value, windows.index(spec.sliding_window)))
        zero = torch.zeros(1, dtype=torch.int64, device=parameter.device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=parameter.device)
        metadata = AttentionMetadata(
            starts,
            (zero + 1).int(),
            num_decodes=1,
            block_size=1,
            groups=[BlockTables(zero.int().unsqueeze(0), zero, window) for window in windows],
            query_starts_host=np.array([0, 1], dtype=np.int32),
            seq_lens_host=np.array([1], dtype=np.int32),
        )
        with torch.inference_mode():
            self.logits(self.forward(StepInputs(zero, zero, self.backend.prepare(metadata), caches)))
        odd = [str(layer.index) for layer in self._layers if layer.calls != 1]
        if odd:
            raise ModelError(
                f"{type(self.head).__name__}: layers {', '.join(odd)} do not call transformers' attention interface "
                "once a token, so the model cannot run on the paged cache"
            )


@dataclass
class _Output(MoeModelOutputWithPast):
    """What any model's head may look at behind its decoder."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


class _Given(nn.Module):
    """Stands in for the decoder when only what follows it is wanted: answers with what it is given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class _Step:
    """The step that runs now; shared by a model's layers."""

    inputs: StepInputs | None = None


class _PagedLayer:
    """Attention of one layer: the cache it writes, and the shape that its first call has shown.

    Attributes:
        calls: how often the layer attended.
    """

    def __init__(self, index: int, spec: CacheSpec, backend: AttentionBackend, step: _Step) -> None:
        self.index = index
        self.calls = 0
        self._spec = spec
        self._backend = backend
        self._step = step
        self._shape: AttentionShape | None = None

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor:
        """[1, heads, tokens, d] each → [1, tokens, heads, value d]."""
        if self._shape is None:
            self._shape = self._understand(module, query, key, value, given)
        self.calls += 1
        assert self._step.inputs is not None
        query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        cache, metadata = self._step.inputs.caches[self.index], self._step.inputs.attention
        attended = self._backend.forward(self._shape, query, key, value, cache, metadata)
        return attended.unflatten(-1, (self._shape.num_heads, -1)).unsqueeze(0)  # type: ignore[no-any-return]

    def _understand(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
    ) -> AttentionShape:
        name = f"{type(module).__name__} of layer {self.index}"
        unknown = sorted(
            key for key in given.keys() - _UNDERSTOOD if given[key] is not None and given[key] is not False
        )
        if unknown:
            raise ModelError(f"{name} asks attention for {', '.join(unknown)}, which the paged cache does not offer")
        if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelError(f"{name} is not causal; this engine serves autoregressive decoders")
        window = given.get("sliding_window") or None
        found = CacheSpec(key.shape[1], key.shape[-1], value.shape[-1], window or self._spec.sliding_window)
        if found != self._spec:
            raise ModelError(f"{name} keeps {found} where its config states {self._spec}; the model cannot be served")
        scale = given.get("scaling")
        return AttentionShape(
            num_heads=query.shape[1],
            num_kv_heads=found.num_kv_heads,
            head_dim=found.head_dim,
            value_head_dim=found.value_head_dim,
            scale=float(found.head_dim**-0.5 if scale is None else scale),
            sliding_window=found.sliding_window,
            logits_soft_cap=given.get("softcap"),
        )


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface."""
    layer = getattr(module, "stoker_layer", None)
    if layer is None or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} {'brings a mask of its own' if layer else 'is no layer of the decoder'}, "
            "so the model cannot run on the paged cache"
        )
    return layer.attend(module, query, key, value, given), None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)


def _fix_rotary(module: nn.Module, max_model_len: int) -> None:
    """Makes rotary embeddings that look at the longest position of a batch always see `max_model_len`.

    ``dynamic`` and ``longrope`` choose their factors by it, and a request's output must not depend on its neighbours.
    So the last position possible is shown beside the batch's own, and what it gives is dropped.
    """
    kinds = getattr(module, "rope_type", None)
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    if not kinds & {"dynamic", "longrope"}:
        return
    whole = module.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, ...]:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), max_model_len - 1)
        rotated = whole(x, torch.cat((position_ids, last), dim=-1), **rest)
        return tuple(part[..., :-1, :] for part in rotated)

    module.forward = forward


@dataclass(frozen=True)
class TransformersLoader:
    """A folder whose model transformers knows, and no family here describes.

    Attributes:
        folder: a Hugging Face folder with safetensors.
        config: transformers' reading of its config.json.
        model: the class that is made of it.
        trust_remote_code: whether that class may come from the folder.
    """

    folder: Path
    config: PreTrainedConfig
    model: type[PreTrainedModel]
    trust_remote_code: bool

    @classmethod
    def of(cls, folder: Path, given: Mapping[str, Any], trust_remote_code: bool) -> TransformersLoader:
        """The loader for `folder`, whose config.json reads `given`.

        Raises:
            ModelError: the model is not served; says why.
        """
        refuse_quantized(given)
        name = (given.get("architectures") or ["unknown"])[0]
        remote = (given.get("auto_map") or {}).get("AutoModelForCausalLM")
        if remote is None or not trust_remote_code:
            if given.get("model_type") not in CONFIG_MAPPING:
                raise ModelError(_unknown(name, given.get("model_type"), remote))
            config = CONFIG_MAPPING[given["model_type"]].from_dict(read_json_object(folder / "config.json"))
            return cls(folder, config, model_class(config, name), False)
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
        except OSError as error:  # such as for a byte-order mark, which the model's own class would have to read over
            raise ModelError(f"transformers cannot read {folder / 'config.json'}: {error}") from error
        model = get_class_from_dynamic_module(remote, folder, local_files_only=True)
        check_class(model, config)
        return cls(folder, config, model, True)

    def model_config(self) -> ModelConfig:
        """The model's shape, as far as the cache and memory arithmetic need it."""
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
        end_tokens = config.eos_token_id
        return ModelConfig(
            architecture=self.model.__name__,
            model_type=str(config.model_type),
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            max_position_embeddings=int(config.max_position_embeddings),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            dtype=str(given.get("dtype") or given.get("torch_dtype") or "float32"),
            eos_token_ids=tuple(end_tokens if isinstance(end_tokens, list) else [end_tokens] if end_tokens else []),
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
                f"{config.architecture} runs by transformers' own modules, which are not split over {build.ranks.size} "
                "ranks; leave out --tensor-parallel-size"
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
            ("lack tensors the model needs", report["missing_keys"]),
            ("hold tensors the model has no place for", {n for n in report["unexpected_keys"] if not is_kv_scale(n)}),
            ("hold tensors of another shape", report["mismatched_keys"]),
        ):
            if names:
                raise WeightsError(f"weights {what}: {', '.join(sorted(map(str, names))[:5])} ({len(names)} in all)")
        model = model.to(device).eval()
        self._check_weights(dict(model.named_parameters()))
        return TransformersModel(config, model, build.backend, max_model_len)

    def _check_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """What transformers casts or takes without a word."""
        for name, dtype in SafetensorsFolder(self.folder).not_floating().items():
            if name in weights or f"{self.model.base_model_prefix}.{name}" in weights:
                raise not_floating(name, dtype)
        for name, tensor in weights.items():
            check_finite(name, tensor)


@contextmanager
def _watched(progress: LoadProgress) -> Iterator[None]:
    """Each step of transformers' progress bars is progress."""

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
            f"{architecture} brings Python code of its own ({remote}), which is not run unasked; "
            "read it, then allow it with --trust-remote-code"
        )
    return (
        f"{architecture} (model type {model_type!r}) is known neither here nor to transformers {transformers_version}; "
        "a newer transformers may know it"
    )


def _rope(c: Fields, head_dim: int) -> RopeParameters | None:
    """How far positions are stretched; None where transformers states it in a way of its own."""
    try:
        return read_rope(c, head_dim)
    except ModelError:
        return None
