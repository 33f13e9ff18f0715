"""Adapters created and saved by PEFT, with random values in both matrices, so that each changes the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

#: Position embeddings, which adapters do not change here.
_POSITIONS = ("wpe", "embed_positions", "position_embeddings")


def linear_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of all modules of a model that adapters can change."""
    kinds = (nn.Linear, Conv1D, nn.Embedding)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and name.rpartition(".")[2] not in _POSITIONS
    ]


def stacked_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters that contain all experts' matrices."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() == 3]


class PeftAdapters:
    """A transformers model with PEFT adapters; save the model before calling `save_adapter`.

    Attributes:
        names: names of the adapters, in order of creation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules, self._parameters = linear_modules(model), stacked_parameters(model)
        self._model: Any = model
        self.names: list[str] = []

    def save_adapter(self, folder: Path, **fields: Any) -> Path:
        """Create another adapter on all supported modules, or as `fields` of `LoraConfig` say."""
        name = f"adapter{len(self.names)}"
        torch.manual_seed(len(self.names) + 1)
        given = {"target_modules": self._modules, "init_lora_weights": False, "r": 4, "lora_alpha": 8, **fields}
        if self._parameters and "target_modules" not in fields:
            given.setdefault("target_parameters", self._parameters)
        config = LoraConfig(**given)
        if isinstance(self._model, PeftModel):
            self._model.add_adapter(name, config)
        else:
            self._model = get_peft_model(self._model, config, adapter_name=name)
        self._model.eval()
        self._model.save_pretrained(folder, selected_adapters=[name])
        self.names.append(name)
        return folder / name

    def reference(self, adapter: int) -> Callable[[list[int]], torch.Tensor]:
        """Return a function for one sequence's logits [tokens, vocabulary] with an unmerged adapter; -1: none."""

        def logits(tokens: list[int]) -> torch.Tensor:
            with torch.inference_mode():
                if adapter < 0:
                    with self._model.disable_adapter():
                        found: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
                else:
                    self._model.set_adapter(self.names[adapter])
                    found = self._model(torch.tensor([tokens])).logits[0]
            return found

        return logits
