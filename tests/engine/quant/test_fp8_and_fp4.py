"""FP8, Model Optimizer's and MXFP4 checkpoints, compared with transformers' dequantization, or torch's arithmetic."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.quantization import fp8 as fp8_config
from stoker_engine.architectures.quantization import modelopt as modelopt_config
from stoker_engine.architectures.quantization import mxfp4 as mxfp4_config
from stoker_engine.kernels.group_blocks import dequantize
from stoker_engine.quant.checkpoints import fp8, modelopt, mxfp4
from stoker_engine.quant.checkpoints.grouped_matrix import GroupedMatrix, Pairs

from .stored_tensors import StoredTensors, whole

_UP, _EXPERTS = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def _values(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return (torch.randn(shape) * 100).to(dtype)


def _scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape) * 0.01 + 1e-4).to(dtype)


def _fp8(tensors: Mapping[str, torch.Tensor], **config: Any) -> dict[str, GroupedMatrix]:
    model_config = {"quantization_config": {"quant_method": "fp8", **config}}
    return fp8.find_modules(fp8_config.parse(model_config), StoredTensors(tensors))


def _dequantized(module: GroupedMatrix) -> torch.Tensor:
    return dequantize(module.rows(whole(module)), module.format, module.shape[-1], torch.float32)


def _by_transformers(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantize with transformers, which requires padding to whole blocks of 128."""
    *_, rows, columns = weight.shape
    high, wide = (-rows % 128, -columns % 128) if scale.shape[-2:] != (1, 1) else (0, 0)
    padded = torch.nn.functional.pad(weight.view(torch.uint8), (0, wide, 0, high)).view(weight.dtype)
    dequantized: torch.Tensor = Fp8Dequantize(types.SimpleNamespace())._dequantize_one(padded, scale, torch.float32)
    return dequantized[..., :rows, :columns]


@pytest.mark.parametrize(("outputs", "inner"), [(256, 256), (130, 384), (576, 200), (5, 7), (128, 127), (1, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_128_equal_transformers(outputs: int, inner: int, dtype: torch.dtype) -> None:
    weight, scale = _values(outputs, inner), _scales(-(-outputs // 128), -(-inner // 128), dtype=dtype)
    tensors = {f"{_UP}.weight": weight, f"{_UP}.weight_scale_inv": scale}
    (module,) = _fp8(tensors, weight_block_size=[128, 128]).values()
    assert module.format.group == (128 if inner > 128 else 0)
    expected = _by_transformers(weight, scale)
    assert torch.equal(_dequantized(module), expected)
    stored = StoredTensors(tensors)
    (module,) = fp8.find_modules(fp8_config.parse({"quantization_config": _BLOCKS}), stored).values()
    for start, stop in ((0, outputs), (outputs // 2, outputs), (outputs - 1, outputs), (0, 1)):
        column_start = 128 * (inner // 128 // 2)
        stored.read_bytes = 0
        part = module.rows((slice(start, stop), slice(column_start, inner)))
        assert torch.equal(
            dequantize(part, module.format, inner - column_start, torch.float32), expected[start:stop, column_start:]
        )
        assert stored.read_bytes <= (stop - start) * (inner - column_start) + scale.numel() * scale.itemsize
    if inner > 128:
        with pytest.raises(WeightsError, match="cannot be split"):
            module.rows((slice(0, 1), slice(64, inner)))


_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("blocks", [None, [128, 128]])
def test_scale_per_tensor_equals_torch(name: str, shape: tuple[int, ...], blocks: list[int] | None) -> None:
    weight, scale = _values(133, 250), _scales(*shape)
    tensors = {f"{_UP}.weight": weight, f"{_UP}.{name}": scale, f"{_UP}.input_scale": _scales()}
    modules = _fp8(tensors, activation_scheme="static", weight_block_size=blocks)
    assert torch.equal(_dequantized(modules[_UP]), weight.float() * scale.float())
    assert modules[_UP].tensors == set(tensors)
    part = modules[_UP].rows((slice(3, 9), slice(7, 11)))
    columns = dequantize(part, modules[_UP].format, 4, torch.float32)
    assert torch.equal(columns, (weight.float() * scale.float())[3:9, 7:11])


@pytest.mark.parametrize("shape", [(40,), (40, 1)])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_scale_per_row_equals_torch(method: str, shape: tuple[int, ...]) -> None:
    weight, scale = _values(40, 48), _scales(*shape)
    tensors = {f"{_UP}.weight": weight, f"{_UP}.weight_scale": scale, f"{_UP}.input_scale_ub": _scales(1)}
    (module,) = _fp8(tensors, quant_method=method).values()
    assert torch.equal(_dequantized(module), weight.float() * scale.float().view(40, 1))
    assert module.tensors == set(tensors)


def test_e5m2_weights_equal_torch() -> None:
    weight = _values(8, 16, dtype=torch.float8_e5m2)
    (module,) = _fp8({f"{_UP}.weight": weight, f"{_UP}.weight_scale": torch.tensor(0.5)}, fmt="e5m2").values()
    assert torch.equal(_dequantized(module), weight.float() * 0.5)
    assert module.format.code == "fp8_e5m2"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_e8m0_scales_equal_transformers(dtype: torch.dtype) -> None:
    weight = _values(6, 96)
    scale = torch.randint(110, 130, (6, 3), dtype=torch.uint8)
    tensors = {f"{_UP}.weight": weight, f"{_UP}.weight_scale_inv": scale.view(dtype)}
    config = fp8_config.parse({"quantization_config": {**_BLOCKS, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}})
    (module,) = fp8.find_modules(config, StoredTensors(tensors)).values()
    assert module.format == config.format_of(_UP, 6, 96)
    dequantized = Fp8Dequantize(types.SimpleNamespace())._dequantize_one(weight, scale, torch.float32)
    assert torch.equal(_dequantized(module), dequantized)


def test_stacked_experts_in_blocks_equal_transformers() -> None:
    weight, scale = _values(3, 256, 384), _scales(3, 2, 3)
    name = f"{_EXPERTS}.gate_up_proj"
    modules = _fp8({name: weight, f"{name}_scale_inv": scale}, weight_block_size=[128, 128])
    expected = _by_transformers(weight, scale)
    assert torch.equal(_dequantized(modules[name]), expected)
    part = modules[name].rows((slice(1, 2), slice(100, 200), slice(128, 384)))
    assert torch.equal(dequantize(part, modules[name].format, 256, torch.float32), expected[1:2, 100:200, 128:])


def test_stacked_experts_with_a_scale_each_equal_torch() -> None:
    weight, scale = _values(3, 8, 16), _scales(3)
    name = f"{_EXPERTS}.down_proj"
    (module,) = _fp8({name: weight, f"{name}_scale": scale}).values()
    assert torch.equal(_dequantized(module), weight.float() * scale.view(3, 1, 1))


def test_unquantized_tensors_and_cache_scales_are_ignored() -> None:
    others = {
        "model.embed_tokens.weight": torch.zeros(4, 4),
        "model.layers.0.self_attn.k_scale": torch.ones(()),
        "model.layers.0.self_attn.k_proj.output_scale": torch.ones(()),
        "model.layers.0.mlp.gate.weight": torch.zeros(4, 4, dtype=torch.bfloat16),
    }
    assert not _fp8(others)


def test_cache_scales_do_not_belong_to_a_module() -> None:
    name = "model.layers.0.self_attn.k_proj"
    tensors = {f"{name}.weight": _values(8, 8), f"{name}.weight_scale": _scales(1), f"{name}.input_scale": _scales(1)}
    (module,) = _fp8(tensors | {f"{name}.output_scale": _scales(1), f"{name}.k_scale": _scales(1)}).values()
    assert module.tensors == set(tensors)


def test_unquantized_modules_follow_from_the_config() -> None:
    config = fp8_config.parse(
        {
            "quantization_config": {
                **_BLOCKS, "modules_to_not_convert": ["model.layers.1.self_attn", "visual", "model.layers.*.router"],
            }
        }
    )  # fmt: skip
    assert config.format_of("model.layers.0.self_attn.q_proj", 4, 256) == config.format
    assert config.format_of("model.layers.11.self_attn.q_proj", 4, 256) == config.format
    for unquantized in (
        *("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj"),
        *("visual.blocks.0.qkv", "model.visual.merger", "model.layers.7.router"),
    ):
        assert config.format_of(unquantized, 4, 4) is None, unquantized


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [128, 24]}, "weight_block_size"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"weight_block_size": [128, 2**36]}, "weight_block_size"),
        ({"weight_block_size": [2**70, 128]}, "weight_block_size"),
        ({"weight_block_size": "128x128"}, "weight_block_size"),
        ({"activation_scheme": "sometimes"}, "activation_scheme"),
        ({"expert_dtype": "fp4"}, "experts of fp4"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    ],
)
def test_invalid_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        fp8_config.parse({"quantization_config": {"quant_method": "fp8", **changes}})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": _values(8, 8)}, "no weight_scale"),
        ({"weight_scale": _scales(1)}, "no weight"),
        (
            {"weight": _values(8, 8), "weight_scale": _scales(1), "weight_scale_inv": _scales(1)},
            "weight_scale_inv does not belong",
        ),
        ({"weight": torch.zeros(8, 8), "weight_scale": _scales(1)}, "holds float32"),
        ({"weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fnuz), "weight_scale": _scales(1)}, "float8_e4m3fnuz"),
        ({"weight": _values(8), "weight_scale": _scales(1)}, "not a matrix"),
        ({"weight": _values(8, 0), "weight_scale": _scales(1)}, "not a matrix"),
        ({"weight": _values(8, 8), "weight_scale": _scales(7)}, "has shape"),
        ({"weight": _values(8, 8), "weight_scale": _scales(0)}, "has shape"),
        ({"weight": _values(300, 8), "weight_scale_inv": _scales(2, 1)}, "has shape"),
        ({"weight": _values(8, 8), "weight_scale": _scales(1).double()}, "float64"),
        ({"weight": _values(8, 8), "weight_scale": torch.ones(1, dtype=torch.int64)}, "int64"),
    ],
)
def test_damaged_fp8_is_refused_with_a_short_message(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as error:
        _fp8({f"{_UP}.{name}": tensor for name, tensor in tensors.items()}, weight_block_size=[128, 128])
    assert _UP in str(error.value) and len(str(error.value)) < 300


def _modelopt(algorithm: str, **config: Any) -> fp8_config.FP8 | modelopt_config.NVFP4:
    return modelopt_config.parse(
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, **config}}
    )


@pytest.mark.parametrize(
    ("algorithm", "scale"),
    [("FP8", _scales()), ("FP8_PER_CHANNEL_PER_TOKEN", _scales(160)), ("fp8_pb_wo", _scales(2, 1, 3, 1))],
)
def test_fp8_of_model_optimizer_equals_torch(algorithm: str, scale: torch.Tensor) -> None:
    weight = _values(160, 320)
    tensors = {f"{_UP}.weight": weight, f"{_UP}.weight_scale": scale, f"{_UP}.input_scale": _scales()}
    config = _modelopt(algorithm)
    (module,) = modelopt.find_modules(config, StoredTensors(tensors)).values()
    assert module.format == config.format_of(_UP, 160, 320)
    blocks = scale.view(2, 3) if scale.dim() == 4 else scale.view(-1, 1)
    repeated = blocks.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :320] if scale.dim() == 4 else blocks
    assert torch.equal(_dequantized(module), weight.float() * repeated)


def test_mxfp8_of_model_optimizer_equals_torch() -> None:
    weight, scale = _values(5, 64), torch.randint(100, 130, (5, 2), dtype=torch.uint8)
    config = _modelopt("MXFP8")
    tensors = {f"{_UP}.weight": weight, f"{_UP}.weight_scale": scale}
    (module,) = modelopt.find_modules(config, StoredTensors(tensors)).values()
    assert config.method == "modelopt_mxfp8" and module.format == config.format_of(_UP, 5, 64)
    expected = weight.float() * (scale.float() - 127).exp2().repeat_interleave(32, 1)
    assert torch.equal(_dequantized(module), expected)


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_nvfp4_of_model_optimizer_equals_torch() -> None:
    codes = torch.randint(0, 16, (12, 48))
    scale = _values(12, 3).abs()
    tensors = {
        f"{_UP}.weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        f"{_UP}.weight_scale": scale,
        f"{_UP}.weight_scale_2": torch.tensor(0.0031),
        f"{_UP}.input_scale": torch.tensor(1.0),
    }
    config = _modelopt("NVFP4", exclude_modules=["lm_head", "*.self_attn*"])
    (module,) = modelopt.find_modules(config, StoredTensors(tensors)).values()
    assert config.method == "modelopt_fp4" and module.format == config.format_of(_UP, 12, 48)
    assert config.format_of("model.layers.3.self_attn.o_proj", 12, 48) is None
    expected = _FP4[codes] * (scale.float() * torch.tensor(0.0031)).repeat_interleave(16, 1)
    assert torch.equal(_dequantized(module), expected)
    part = module.rows((slice(3, 4), slice(16, 48)))
    assert torch.equal(dequantize(part, module.format, 32, torch.float32), expected[3:4, 16:])
    for missing in ("weight", "weight_scale", "weight_scale_2"):
        less = {name: tensor for name, tensor in tensors.items() if name != f"{_UP}.{missing}"}
        with pytest.raises(WeightsError, match=_UP):
            modelopt.find_modules(config, StoredTensors(less))


def test_pairs_of_codes_may_be_cut_between_any_columns() -> None:
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    pairs = Pairs(StoredTensors({"codes": codes[:, 0::2] | codes[:, 1::2] << 4}), "codes")
    for start, stop in ((0, 64), (1, 64), (3, 4), (5, 32), (31, 33), (33, 63)):
        assert torch.equal(pairs.read((slice(1, 3), slice(start, stop))), codes[1:3, start:stop])


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "MIXED_PRECISION", ""])
def test_other_algorithms_of_model_optimizer_are_refused_by_name(algorithm: str) -> None:
    with pytest.raises(ModelError, match="supported are FP8"):
        _modelopt(algorithm)


def test_mxfp4_stacks_equal_transformers() -> None:
    name = f"{_EXPERTS}.gate_up_proj"
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
    stored = StoredTensors({f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.zeros(3, 10)})
    config = mxfp4_config.parse(
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
    )
    (module,) = mxfp4.find_modules(config, stored).values()
    assert module.shape == (3, 10, 128) and module.format == config.format_of(name, 10, 128)
    assert config.format_of("model.layers.0.self_attn.q_proj", 10, 128) is None
    # transformers' result has columns first.
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(_dequantized(module), expected)
    stored.read_bytes = 0
    part = module.rows((slice(1, 3), slice(2, 5), slice(32, 96)))
    assert torch.equal(dequantize(part, module.format, 64, torch.float32), expected[1:3, 2:5, 32:96])
    assert stored.read_bytes == 2 * 3 * (2 * 16 + 2)


@pytest.mark.parametrize(
    "damage",
    [
        {"blocks": None},
        {"scales": None},
        {"blocks": torch.zeros(3, 10, 4, 8, dtype=torch.uint8)},
        {"blocks": torch.zeros(3, 10, 4, 16)},
        {"blocks": torch.zeros(3, 0, 4, 16, dtype=torch.uint8)},
        {"scales": torch.zeros(3, 10, 5, dtype=torch.uint8)},
        {"scales": torch.zeros(3, 10, 4)},
    ],
)
def test_damaged_mxfp4_is_refused_by_name(damage: dict[str, torch.Tensor | None]) -> None:
    parts = {"blocks": torch.zeros(3, 10, 4, 16, dtype=torch.uint8), "scales": torch.zeros(3, 10, 4, dtype=torch.uint8)}
    tensors = {f"experts.{name}": tensor for name, tensor in (parts | damage).items() if tensor is not None}
    stored = StoredTensors({name.replace("experts.", "experts.up_"): tensor for name, tensor in tensors.items()})
    with pytest.raises(WeightsError, match=r"experts\.up"):
        mxfp4.find_modules(mxfp4_config.parse({"quantization_config": {}}), stored)
