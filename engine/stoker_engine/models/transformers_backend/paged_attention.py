"""Paged attention as an implementation of transformers' attention interface."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface

from stoker_common.errors import ModelError
from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.attention.backend import AttentionBackend, AttentionShape
from stoker_engine.models.model import StepInputs

#: Name of the attention implementation in transformers' registry.
IMPLEMENTATION: Final = "stoker_paged"

#: Keyword arguments of the attention interface that are supported or can be ignored.
_UNDERSTOOD: Final = frozenset(
    {"scaling", "sliding_window", "softcap", "dropout", "is_causal", "position_ids", "position_embeddings"}
)


class Step:
    """The current step, shared by all layers of a model."""

    inputs: StepInputs | None = None


class PagedLayer:
    """Attention of one layer. Its shape is read from the arguments of its first call.

    Attributes:
        calls: number of calls of `attend`.
    """

    def __init__(self, index: int, spec: CacheSpec, backend: AttentionBackend, step: Step) -> None:
        self.index = index
        self.calls = 0
        self._spec = spec
        self._backend = backend
        self._step = step
        self._shape: AttentionShape | None = None

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor:
        """Store keys and values and compute attention: query, key, value [1, heads, tokens, head size] → [1, tokens,
        heads, value head size].

        Args:
            given: the other keyword arguments of transformers' attention interface.
        """
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
            raise ModelError(f"{name} needs {', '.join(unknown)}, which paged attention does not support")
        if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelError(f"{name} is not causal; this engine serves autoregressive decoders")
        window = given.get("sliding_window") or None
        found = CacheSpec(key.shape[1], key.shape[-1], value.shape[-1], window or self._spec.sliding_window)
        if found != self._spec:
            raise ModelError(f"{name} stores {found}, but its config states {self._spec}; the model cannot be served")
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
    """Implement transformers' attention interface."""
    layer = getattr(module, "stoker_layer", None)
    if layer is None or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} {'has its own attention mask' if layer else 'is not a layer of the decoder'}, "
            "so the model cannot run on the paged cache"
        )
    return layer.attend(module, query, key, value, given), None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
