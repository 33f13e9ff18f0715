"""Adapter that makes a causal language model of transformers a `models.model.Model`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from stoker_common.errors import ModelError
from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.backend import AttentionBackend, KVCache
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.models.model import StepInputs
from stoker_engine.models.transformers_backend.paged_attention import PagedLayer, Step

logger = logging.getLogger(__name__)


class TransformersModel(nn.Module):
    """A causal language model of transformers, as a `Model`.

    Args:
        language_model: loaded model on its device, created with the attention implementation `IMPLEMENTATION`.
        max_model_len: maximum length of a sequence in tokens; some rotary embeddings are computed for this length.

    Raises:
        ModelError: the model needs an attention feature that is not supported.
    """

    def __init__(
        self, config: ModelConfig, language_model: PreTrainedModel, backend: AttentionBackend, max_model_len: int
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        specs = [layer.attention.cache for layer in config.layers]
        logger.info("%s runs on the Transformers backend, which is slower than native models", config.architecture)
        self.decoder = language_model.base_model
        self.head = language_model
        setattr(language_model, language_model.base_model_prefix, _Given())
        self._step = Step()
        self._layers = [PagedLayer(index, spec, backend, self._step) for index, spec in enumerate(specs)]
        for module in self.decoder.modules():
            if isinstance(index := getattr(module, "layer_idx", None), int) and index < len(specs):
                module.stoker_layer = self._layers[index]  # type: ignore[assignment]
            _fix_rotary(module, max_model_len)
        self._rehearse(specs)

    def forward(self, inputs: StepInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        assert hidden is None, "the Transformers backend has no pipeline stages"
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
        """Run one token on caches of one block, so that each layer's attention is checked.

        Raises:
            ModelError: a layer does not call the attention interface exactly once, or needs an unsupported feature.
        """
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
                "exactly once for each token, so the model cannot run on the paged cache"
            )


@dataclass
class _Output(MoeModelOutputWithPast):
    """Decoder output with every field that the head of a model may read."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


class _Given(nn.Module):
    """Stand-in for the decoder that returns its input, so that `logits` runs only the head."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def _fix_rotary(module: nn.Module, max_model_len: int) -> None:
    """Make a module's rotary embeddings independent of the batch's highest position: compute them for `max_model_len`.

    ``dynamic`` and ``longrope`` choose their factors by that position, but a request's output must not depend on other
    requests. So the position `max_model_len` - 1 is appended to each batch, and its result is dropped.
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
