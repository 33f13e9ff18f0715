"""A LoRA adapter as a script asks for it, with vLLM's names."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that `LLM.generate` computes prompts with. It is loaded at its first use.

    Attributes:
        lora_name: for the log and errors.
        lora_int_id: 1 or more; the same id always stands for the same adapter.
        lora_path: the folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ValueError: the id is no whole number of at least 1, or the name or the path is empty or no string.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be a string that is not empty, got {self.lora_name!r}")
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be a whole number of at least 1, got {self.lora_int_id!r}")
        if not isinstance(self.lora_path, str | os.PathLike) or not os.fspath(self.lora_path):
            raise ValueError(f"lora_path must name a folder, got {self.lora_path!r}")
