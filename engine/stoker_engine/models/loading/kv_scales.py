"""A checkpoint's scales for an fp8 KV cache: for each layer one for keys and one for values, or one of each per KV
head.

    layers.{i}.self_attn.k_scale, v_scale                 compressed-tensors, and vLLM's own
    layers.{i}.self_attn.attn.k_scale, v_scale            vLLM's attention layer
    layers.{i}.self_attn.k_proj.k_scale, v_proj.v_scale   ModelOpt
    layers.{i}.self_attn.k_proj.output_scale, …           older compressed-tensors
    layers.{i}.self_attn.kv_scale                         oldest form: one for both keys and values

If only keys or only values have a scale, it applies to both, as in vLLM. Scales of queries and attention weights are
ignored, because neither is quantized.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

import torch

from stoker_common.errors import ArgumentError, WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.layers.build import Build
from stoker_engine.models.loading.weight_source import WeightSource

logger = logging.getLogger(__name__)

#: Key scale and value scale of a layer: float32 [1], or [KV heads of this rank].
LayerScales = tuple[torch.Tensor, torch.Tensor]

#: Group 1 is the layer index.
_SCALE = re.compile(r"(?:^|\.)(\d{1,9})\.(?:[a-z]\w*\.)*(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")
_NOT_NEEDED = re.compile(r"\.(?:(?:q|prob|prob_output)_scale|q_proj\.output_scale)$")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of the files is a scale of the KV cache or of quantized attention, by its name."""
    return bool(_SCALE.search(name) or _NOT_NEEDED.search(name))


def kv_scales(
    kv_cache_dtype: str, source: WeightSource, config: ModelConfig, build: Build, stated: str = ""
) -> dict[int, LayerScales]:
    """Return the KV-cache scales of this rank's layers, by layer index. Layers without an entry have the scale 1.
    Formats other than fp8 and fp8_e4m3 use none of the checkpoint's scales.

    Args:
        stated: see `architectures.quantization.read.kv_cache_of`.

    Raises:
        ArgumentError: fp8_e5m2 with a checkpoint that has scales, which are for e4m3, or fp8 with scales for another
            format.
        WeightsError: a scale is not a positive number, the number of scales is neither 1 nor the number of KV heads, or
            a layer with a scale has no KV cache.
    """
    names = _names(source.names(), config.num_hidden_layers)
    if kv_cache_dtype == "fp8_e5m2" and names:
        raise ArgumentError(
            "--kv-cache-dtype", "fp8_e5m2 uses no scales, but the checkpoint has scales for fp8_e4m3; use fp8"
        )
    if kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        if names:
            logger.info(
                "--kv-cache-dtype %s ignores the checkpoint's KV-cache scales; fp8 uses them",
                kv_cache_dtype,
            )
        return {}
    if names and stated not in ("", "fp8"):
        raise ArgumentError(
            "--kv-cache-dtype",
            f"{kv_cache_dtype} cannot use the checkpoint's scales, which are for keys and values in {stated}; "
            "use fp8_per_token_head or int8_per_token_head, which compute their own scales",
        )
    found = {}
    local = build.stage.layers(len(config.layers))
    for layer, by_kind in names.items():
        if layer not in local:
            continue
        key, value = (
            _read(source, by_kind[kind], layer, config, build) if kind in by_kind else None for kind in ("key", "value")
        )
        either = key if key is not None else value
        assert either is not None
        found[layer] = (either if key is None else key, either if value is None else value)
    without = sum(layer.cache.kind == "tokens" for layer in config.layers) - len(names)
    if without:
        missing = f"{without} layers" if names else "keys and values"
        logger.warning("the checkpoint states no scales for %s in fp8: 1.0 is used", missing)
    return found


def _names(names: Iterable[str], num_layers: int) -> dict[int, dict[str, str]]:
    """Return for each layer the names of the scale tensors, by "key" and "value"."""
    found: dict[int, dict[str, str]] = {}
    for name in sorted(names, key=lambda each: not each.endswith("kv_scale")):  # k_scale and v_scale override kv_scale
        match = _SCALE.search(name)
        if match is None or int(match[1]) >= num_layers:
            continue
        kind = match[2] or match[3]
        by_kind = found.setdefault(int(match[1]), {})
        if kind != "v":
            by_kind["key"] = name
        if kind != "k":
            by_kind["value"] = name
    return found


def _read(source: WeightSource, name: str, layer: int, config: ModelConfig, build: Build) -> torch.Tensor:
    spec = config.layers[layer].cache
    if spec.kind != "tokens":
        raise WeightsError(f"{name} is a KV-cache scale, but layer {layer} has no KV cache")
    scale = source.read(name).flatten().float()
    if len(scale) not in (1, spec.num_kv_heads):
        raise WeightsError(f"{name} holds {len(scale)} scales; expected one, or one for each key-value head")
    if not bool((scale > 0).all() and scale.isfinite().all()):
        raise WeightsError(f"{name} holds {scale[~(scale > 0) | scale.isinf()][0]}; a scale must be a positive number")
    if len(scale) == 1 or spec.latent:
        return scale
    return scale[build.kv_heads(spec.num_kv_heads).positions].contiguous()
