"""Selection of a LoRA adapter by a script, with vLLM's names."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter for prompts of `LLM`. It is loaded at its first use.

    Attributes:
        lora_name: name for logs and errors.
        lora_int_id: integer of at least 1 that identifies the adapter.
        lora_path: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ValueError: the id is not an integer of at least 1, the name is not a non-empty string, or the path is empty or
            neither a string nor an `os.PathLike`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be a non-empty string, got {self.lora_name!r}")
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be an integer of at least 1, got {self.lora_int_id!r}")
        if not isinstance(self.lora_path, str | os.PathLike) or not os.fspath(self.lora_path):
            raise ValueError(f"lora_path must be the path of a folder, got {self.lora_path!r}")
