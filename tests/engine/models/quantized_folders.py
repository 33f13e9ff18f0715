"""A tiny Llama in each format of quantized checkpoints: random codes in tensors with the right names, shapes and
dtypes.

The values do not matter here. Each is a valid checkpoint, which tests then damage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY, LAYERS = 128, 256, 4, 2, 512, 1
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_KV = HIDDEN // HEADS * KV_HEADS
#: Outputs and inner size of a layer's matrices.
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (_KV, HIDDEN),
    "self_attn.v_proj": (_KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}

Tensors = dict[str, torch.Tensor]


@dataclass
class Folder:
    """A checkpoint in memory."""

    quantization: dict[str, Any] | None
    tensors: Tensors
    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))

    def write(self, path: Path) -> Path:
        """Write it to `path`, which must exist."""
        config = self.config | ({} if self.quantization is None else {"quantization_config": self.quantization})
        (path / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path / "model.safetensors")
        return path


def folder(name: str, layers: int = LAYERS) -> Folder:
    """Return the checkpoint in one of `FORMATS`, with this number of layers."""
    torch.manual_seed(0)
    quantization, components = FORMATS[name]
    tensors: Tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        for matrix, (outputs, inner) in MATRICES.items():
            for component, tensor in components(outputs, inner).items():
                tensors[f"{prefix}{matrix}.{component}"] = tensor
    return Folder(json.loads(json.dumps(quantization)), tensors, CONFIG | {"num_hidden_layers": layers})


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape) * 0.01 + 0.001).to(dtype)


def _fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def _gptq(bits: int, group: int, symmetric: bool = False) -> Callable[[int, int], Tensors]:
    def components(outputs: int, inner: int) -> Tensors:
        zeros = _words(inner // group, outputs * bits // 32)
        return {
            "qweight": _words(inner * bits // 32, outputs),
            "qzeros": torch.full_like(zeros, 0x77777777) if symmetric else zeros,
            "scales": _scales(inner // group, outputs),
            "g_idx": (torch.arange(inner) // group).int(),
        }

    return components


def _awq(outputs: int, inner: int) -> Tensors:
    return {
        "qweight": _words(inner, outputs // 8),
        "qzeros": _words(inner // 32, outputs // 8),
        "scales": _scales(inner // 32, outputs),
    }


def _bitsandbytes_int8(outputs: int, inner: int) -> Tensors:
    return {
        "weight": _bytes(outputs, inner).view(torch.int8),
        "SCB": _scales(outputs, dtype=torch.float32),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _nf4(nested: bool) -> Callable[[int, int], Tensors]:
    def components(outputs: int, inner: int) -> Tensors:
        blocks = outputs * inner // 64
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inner]}
        found = {"weight": _bytes(outputs * inner // 2, 1), "weight.quant_map": torch.tensor(_NF4)}
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.01}
            found |= {
                "weight.absmax": _bytes(blocks),
                "weight.nested_absmax": _scales(math.ceil(blocks / 256), dtype=torch.float32),
                "weight.nested_quant_map": torch.linspace(-1, 1, 256),
            }
        else:
            found["weight.absmax"] = _scales(blocks, dtype=torch.float32)
        text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        return found | {"weight.quant_state.bitsandbytes__nf4": text}

    return components


def _pack_quantized(outputs: int, inner: int) -> Tensors:
    return {
        "weight_packed": _words(outputs, inner // 8),
        "weight_scale": _scales(outputs, inner // 32, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([outputs, inner]),
    }


def _pack_quantized_order(outputs: int, inner: int) -> Tensors:
    columns = (torch.randperm(inner) // 32).int()
    zeros = _words(outputs // 8, inner // 32)
    return _pack_quantized(outputs, inner) | {"weight_zero_point": zeros, "weight_g_idx": columns}


def _int_quantized(outputs: int, inner: int) -> Tensors:
    weight = _bytes(outputs, inner).view(torch.int8)
    return {"weight": weight, "weight_scale": _scales(outputs, 1, dtype=torch.bfloat16)}


def _float_quantized(outputs: int, inner: int) -> Tensors:
    return {"weight": _fp8(outputs, inner), "weight_scale": _scales(outputs, 1, dtype=torch.bfloat16)}


def _nvfp4(outputs: int, inner: int) -> Tensors:
    return {
        "weight_packed": _bytes(outputs, inner // 2),
        "weight_scale": _scales(outputs, inner // 16, dtype=torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([100.0]),
    }


def _modelopt_nvfp4(outputs: int, inner: int) -> Tensors:
    tensors = _nvfp4(outputs, inner)
    return {
        "weight": tensors["weight_packed"],
        "weight_scale": tensors["weight_scale"],
        "weight_scale_2": torch.tensor(0.01),
        "input_scale": torch.tensor(0.5),
    }


def _mxfp4(outputs: int, inner: int) -> Tensors:
    return {"weight_packed": _bytes(outputs, inner // 2), "weight_scale": _bytes(outputs, inner // 32) // 4 + 90}


def _fp8_tensor(outputs: int, inner: int) -> Tensors:
    return {"weight": _fp8(outputs, inner), "weight_scale": torch.tensor(0.01), "input_scale": torch.tensor(0.5)}


def _fp8_blocks(outputs: int, inner: int) -> Tensors:
    scale = _scales(math.ceil(outputs / 128), math.ceil(inner / 128), dtype=torch.float32)
    return {"weight": _fp8(outputs, inner), "weight_scale_inv": scale}


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    defaults = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": defaults | {"dynamic": False} | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "dynamic": {}}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_BITSANDBYTES = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}
_FOUR_BITS = _BITSANDBYTES | {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}

#: By name: quantization_config, and the tensors of a module by its outputs and inputs.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensors]]] = {
    "gptq": (_GPTQ | {"sym": True, "checkpoint_format": "gptq", "lm_head": False}, _gptq(4, 32, symmetric=True)),
    "gptq 8 bits": (_GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, _gptq(8, 32)),
    "gptq 3 bits": (_GPTQ | {"bits": 3, "desc_act": True}, _gptq(3, 32)),
    "awq": (_AWQ | {"modules_to_not_convert": None}, _awq),
    "bitsandbytes int8": (_BITSANDBYTES | {"load_in_8bit": True, "load_in_4bit": False}, _bitsandbytes_int8),
    "bitsandbytes nf4": (_FOUR_BITS | {"bnb_4bit_use_double_quant": False}, _nf4(nested=False)),
    "bitsandbytes nested": (_FOUR_BITS | {"bnb_4bit_use_double_quant": True}, _nf4(nested=True)),
    "pack-quantized": (_compressed("pack-quantized"), _pack_quantized),
    "pack-quantized order": (
        _compressed("pack-quantized", symmetric=False, actorder="group"),
        _pack_quantized_order,
    ),
    "int-quantized": (
        _compressed("int-quantized", num_bits=8, strategy="channel", group_size=None),
        _int_quantized,
    ),
    "float-quantized": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel", group_size=None),
        _float_quantized,
    ),
    "nvfp4": (
        _compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
        _nvfp4,
    ),
    "mxfp4": (_compressed("mxfp4-pack-quantized", type="float"), _mxfp4),
    "modelopt": ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "group_size": 16}, _modelopt_nvfp4),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, _fp8_tensor),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        _fp8_blocks,
    ),
}
