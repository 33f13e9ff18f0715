"""Minimal reader: enough to measure by, until the real one comes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load

from stoker_common.errors import AdapterError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.lora.adapter import Adapter, Factors
from stoker_engine.models.checkpoint import Checkpoint


class AdapterReader:
    def __init__(self, weight_names, config, dtype) -> None:
        self._names, self._config, self._dtype = weight_names, config, dtype

    def read(self, folder: Path) -> Adapter:
        described = (folder / "adapter_config.json").read_bytes()
        data = (folder / "adapter_model.safetensors").read_bytes()
        config, tensors = json.loads(described), load(data)
        digest = hashlib.sha256(described + data).hexdigest()
        scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])

        class Every:
            def __contains__(self, name: object) -> bool:
                return True

        factors = {}
        for name in tensors:
            if not name.endswith(".lora_A.weight"):
                continue
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found = self._names.destination(self._names.canonical(module + ".weight"), Every(), self._config)
            if found is None or len(found.param_names) != 1:
                raise AdapterError(f"{module} is not known")
            a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            factors[found.param_names[0].removesuffix(".weight")] = Factors(
                a.to(self._dtype), (b.float() * scale).to(self._dtype)
            )
        return Adapter(factors, digest)


def adapter_reader(checkpoint: Checkpoint, args: EngineArgs, dtype: torch.dtype) -> AdapterReader:
    return AdapterReader(FAMILIES[checkpoint.config.architecture].weight_names, checkpoint.config, dtype)
