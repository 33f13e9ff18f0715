"""A LoRA adapter as a script asks for it, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that `LLM.generate` computes prompts with. It is loaded at its first use.

    Attributes:
        lora_name: for the log and errors.
        lora_int_id: 1 or more; the same id always stands for the same adapter.
        lora_path: the folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ValueError: the id is less than 1, or the path is empty.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError("lora_path must name a folder, it is empty")
