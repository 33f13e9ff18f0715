"""compressed-tensors: output of the library's compressors, compared with its decompression."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.quantization.compressed_tensors import CompressedTensors, parse
from stoker_engine.kernels.group_blocks import dequantize
from stoker_engine.quant.checkpoints.compressed_tensors import find_modules

from .compressed import Compressed, with_columns_shuffled
from .stored_tensors import StoredTensors, whole

_NAME = "model.layers.0.mlp.up_proj"


def _config(case: Compressed, **changes: Any) -> CompressedTensors:
    return parse({"quantization_config": case.stated(**changes), "dtype": "bfloat16"})


def _stored(case: Compressed) -> StoredTensors:
    return StoredTensors({f"{_NAME}.{name}": tensor for name, tensor in case.tensors.items()})


_INT8_INPUTS = {"num_bits": 8, "strategy": "token", "dynamic": True}
_FP8 = {"num_bits": 8, "type": "float"}
_FP8_INPUTS = {**_FP8, "strategy": "tensor"}

CASES: dict[str, dict[str, Any]] = {
    **{f"W{bits}A16 groups": {"weights": {"num_bits": bits, "group_size": 32}} for bits in range(1, 9)},
    **{
        f"W{bits}A16 asymmetric": {"weights": {"num_bits": bits, "group_size": 64, "symmetric": False}}
        for bits in range(2, 9)
    },
    "W4A16 rows": {"weights": {"num_bits": 4, "strategy": "channel"}, "inner": 72, "outputs": 33},
    "W3A16 rows": {"weights": {"num_bits": 3, "strategy": "channel"}, "inner": 77, "outputs": 5},
    "W5A16 rows asymmetric": {
        "weights": {"num_bits": 5, "strategy": "channel", "symmetric": False}, "inner": 51, "outputs": 37,
    },
    "W4A16 tensor": {"weights": {"num_bits": 4, "strategy": "tensor"}},
    "W4A16 float16": {"weights": {"num_bits": 4, "group_size": 128}, "scale_dtype": torch.float16},
    "W4A16 order of weights": {"weights": {"num_bits": 4, "group_size": 32, "actorder": "static"}},
    "W8A16": {"weights": {"num_bits": 8, "group_size": 16}, "scale_dtype": torch.float32},
    "W8A8": {"weights": {"num_bits": 8, "strategy": "channel"}, "inputs": _INT8_INPUTS, "format": "int-quantized"},
    "W8A8 asymmetric": {
        "weights": {"num_bits": 8, "strategy": "channel", "symmetric": False},
        "inputs": _INT8_INPUTS, "format": "int-quantized",
    },
    "W8A8 tensor": {
        "weights": {"num_bits": 8, "strategy": "tensor"}, "inputs": _INT8_INPUTS, "format": "int-quantized",
    },
    "W4A8 naive": {"weights": {"num_bits": 4, "group_size": 32}, "format": "naive-quantized"},
    "W4A8 naive asymmetric": {
        "weights": {"num_bits": 4, "group_size": 32, "symmetric": False}, "format": "naive-quantized",
    },
    "FP8 tensor": {"weights": {**_FP8, "strategy": "tensor"}, "inputs": _FP8_INPUTS, "format": "float-quantized"},
    "FP8 rows": {
        "weights": {**_FP8, "strategy": "channel"}, "inputs": {**_FP8, "strategy": "token", "dynamic": True},
        "format": "float-quantized", "outputs": 7, "inner": 50,
    },
    "FP8 blocks": {
        "weights": {**_FP8, "strategy": "block", "block_structure": [16, 32]},
        "format": "float-quantized", "outputs": 40, "inner": 72,
    },
    "FP8 naive": {"weights": {**_FP8, "group_size": 32}, "format": "naive-quantized", "scale_dtype": torch.float32},
    "NVFP4": {
        "weights": {
            "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn,
        },
        "format": "nvfp4-pack-quantized", "inner": 144,
    },
    "MXFP4": {
        "weights": {
            "num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8,
        },
        "format": "mxfp4-pack-quantized",
    },
    "MXFP8": {
        "weights": {**_FP8, "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
        "format": "mxfp8-quantized",
    },
}  # fmt: skip


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Compressed:
    return Compressed(**CASES[request.param])


def test_dequantized_values_equal_those_of_the_library(case: Compressed) -> None:
    (module,) = find_modules(_config(case), _stored(case)).values()
    assert module.shape == (case.outputs, case.inner)
    found = dequantize(module.rows(whole(module)), module.format, case.inner, torch.float32)
    expected = case.decompressed()
    if module.format.row_scale:
        # The library divides scales by the global scale; Stoker multiplies by its reciprocal.
        torch.testing.assert_close(found, expected.float(), rtol=3e-7, atol=0)
    else:
        assert torch.equal(found, expected.float())


@pytest.mark.parametrize(
    ("name", "scale", "quantized_activations"),
    [
        ("FP8 tensor", "float32", True),
        ("FP8 rows", "float32", True),
        ("FP8 blocks", "bfloat16", False),
        ("FP8 naive", "float32", False),
        ("MXFP8", "e8m0", False),
        ("W8A8", "bfloat16", True),
        ("W8A8 tensor", "bfloat16", True),
        ("W8A8 asymmetric", "bfloat16", False),
        ("W8A16", "float32", False),
    ],
)
def test_quantized_activations_follow_from_the_config(name: str, scale: str, quantized_activations: bool) -> None:
    """Only checkpoints that quantize activations to the type of their weights permit it. FP8's row scales become
    float32."""
    case = Compressed(**CASES[name])
    (module,) = find_modules(_config(case), _stored(case)).values()
    assert (module.format.quantized_activations, module.format.scale) == (quantized_activations, scale)


def test_format_follows_from_the_config(case: Compressed) -> None:
    config = _config(case)
    (module,) = find_modules(config, _stored(case)).values()
    stated = config.format_of(_NAME, *module.shape)
    assert stated is not None
    if case.scale_dtype == torch.bfloat16:
        assert stated == module.format
    assert module.rows(whole(module)).shape == (case.outputs, module.format.row_bytes(case.inner))
    assert config.format_of("lm_head", 100, case.inner) is None
    assert config.format_of("model.embed_tokens", 100, case.inner) is None


def test_parts_equal_the_whole_and_read_only_their_bytes(case: Compressed) -> None:
    stored = _stored(case)
    (module,) = find_modules(_config(case), stored).values()
    whole_rows = module.rows(whole(module))
    whole_values = dequantize(whole_rows, module.format, case.inner, torch.float32)
    all_bytes = sum(tensor.numel() * tensor.itemsize for tensor in case.tensors.values())
    step = module.format.column_multiple
    cuts = [(0, 1), (case.outputs - 1, case.outputs), (3, 5), (0, case.outputs)]
    columns = [(0, case.inner), (step * (case.inner // 2 // step), case.inner), (0, min(step, case.inner))]
    for start, stop in cuts:
        for left, right in columns:
            stored.read_bytes = 0
            part = module.rows((slice(start, stop), slice(left, right)))
            found = dequantize(part, module.format, right - left, torch.float32)
            assert torch.equal(found, whole_values[start:stop, left:right])
            # Zero points are packed in groups of up to 32 rows, codes of up to 32 columns.
            share = (stop - start) * (right - left + 64) / (case.outputs * case.inner)
            assert stored.read_bytes <= all_bytes * share + 32 * (case.inner // 16 + 8)


def test_act_order_columns_are_read_in_order_of_their_groups() -> None:
    case = Compressed({"num_bits": 4, "group_size": 32, "symmetric": False})
    tensors, order = with_columns_shuffled(case, 32)
    stored = StoredTensors({f"{_NAME}.{name}": tensor for name, tensor in tensors.items()})
    config = _config(case, config_groups=_with(case, actorder="group"))
    (module,) = find_modules(config, stored).values()
    assert module.format == config.format_of(_NAME, *module.shape)
    assert module.format.in_order_of == "groups"
    columns = module.columns()
    assert columns is not None and torch.equal(columns, order)
    rows = module.rows(whole(module))
    assert torch.equal(dequantize(rows, module.format, case.inner, torch.float32), case.decompressed())
    with pytest.raises(WeightsError, match="cannot be split"):
        module.rows((slice(0, 8), slice(0, 64)))
    with pytest.raises(WeightsError, match="g_idx"):
        find_modules(_config(case), stored)  # this config has no actorder
    stored.tensors[f"{_NAME}.weight_g_idx"] = torch.arange(case.inner, dtype=torch.int32) // 32
    (module,) = find_modules(config, _stored(case)).values()
    assert module.columns() is None and module.format.in_order_of == "columns"


def _with(case: Compressed, **weights: Any) -> dict[str, Any]:
    """Return the groups of its config, with changed fields of their weights."""
    group = json.loads(json.dumps(case.scheme.model_dump(), default=str))
    return {"group_0": group | {"weights": group["weights"] | weights}}


def test_stacked_experts_are_read() -> None:
    cases = [Compressed({"num_bits": 4, "group_size": 32, "symmetric": False}, outputs=outputs) for outputs in (40, 40)]
    cases[1].tensors["weight_packed"] = cases[1].tensors["weight_packed"].flip(0)
    stacked = {name: torch.stack([each.tensors[name] for each in cases]) for name in cases[0].tensors}
    stored = StoredTensors({f"experts.up.{name}": tensor for name, tensor in stacked.items()})
    stored.tensors["experts.up.weight_shape"] = torch.tensor([2, 40, 128])
    (module,) = find_modules(_config(cases[0]), stored).values()
    assert module.shape == (2, 40, 128)
    rows = module.rows((slice(1, 2), slice(3, 40), slice(64, 128)))
    expected = cases[1].decompressed()[3:, 64:]
    assert torch.equal(dequantize(rows, module.format, 64, torch.float32)[0], expected)


def test_codes_padded_to_words_are_read() -> None:
    """Like versions before 0.14, which packed bits that do not divide a word."""
    case = Compressed({"num_bits": 3, "group_size": 32})
    words = torch.zeros(case.outputs, -(-case.inner // 10), dtype=torch.int64)
    (module,) = find_modules(_config(case), _stored(case)).values()
    codes = dequantize(module.rows(whole(module)), module.format, case.inner, torch.float32)
    scales = case.tensors["weight_scale"].float().repeat_interleave(32, dim=1)
    for column in range(case.inner):
        words[:, column // 10] |= ((codes / scales)[:, column].round().long() + 4) << (column % 10 * 3)
    stored = _stored(case)
    stored.tensors[f"{_NAME}.weight_packed"] = words.int()
    (module,) = find_modules(_config(case), stored).values()
    part = module.rows((slice(3, 9), slice(32, 128)))
    assert torch.equal(dequantize(part, module.format, 96, torch.float32), codes[3:9, 32:])


def test_schemes_match_names_patterns_and_classes() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "group_size": 64, "strategy": "group"}}

    config = parse(
        {
            "quantization_config": {
                "format": "mixed-precision",
                "config_groups": {
                    "linear": group(8, "Linear"),
                    "experts": group(4, "re:.*experts.*"),
                    "one": group(2, "model.layers.1.mlp.experts.3.up_proj", "Embedding"),
                },
                "ignore": ["lm_head", "re:.*self_attn\\.q_proj$"],
            }
        }
    )

    def bits(module: str) -> int | None:
        format = config.format_of(module, 64, 64)
        return None if format is None else format.bits

    assert bits("model.layers.1.mlp.experts.3.up_proj") == 2
    assert bits("model.layers.1.mlp.experts.4.up_proj") == 4
    assert bits("model.layers.1.mlp.gate_proj") == 8
    assert bits("model.embed_tokens") == 2
    assert bits("lm_head") is None
    assert bits("model.layers.0.self_attn.q_proj") is None
    assert bits("model.layers.0.self_attn.q_proj_norm") == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 6, "type": "float"}}}}, "float6"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 16}}}}, "num_bits"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"group_size": 8}}}}, "not a multiple of 16"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"group_size": 0}}}}, "group_size"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"group_size": 2**30}}}}, "group_size"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "attn_head"}}}}, "attn_head"),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}}}},
            "int4 with the strategy 'tensor_group'",
        ),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "block"}}}}, "block_structure"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"dynamic": True}}}}, "dynamic"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "must be an object"),
        ({"config_groups": {"a": {"targets": "Linear", "weights": {}}}}, "config_groups.a"),
        ({"ignore": ["re:("]}, "a pattern that is not supported"),
        ({"ignore": ["re:(a+)+$"]}, "a pattern that is not supported"),
        ({"ignore": ["re:" + "a" * 20_000]}, "a pattern that is not supported"),
        ({"ignore": 5}, "ignore"),
    ],
)
def test_unsupported_configs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _config(Compressed({"num_bits": 4, "group_size": 32}), **changes)


def test_empty_nested_configs_are_ignored() -> None:
    case = Compressed({"num_bits": 4, "group_size": 32})
    dense = {"format": "dense", "targets": [], "sparsity_structure": "unstructured"}
    assert _config(case, sparsity_config={}, transform_config={}, kv_cache_scheme={"num_bits": 8}) == _config(case)
    assert _config(case, sparsity_config=dense, transform_config={"config_groups": {}}) == _config(case)


@pytest.mark.parametrize(
    "stated",
    [
        {"format": "dense", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"format": "dense", "config_groups": {}},
        {},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8}}}},
        {"config_groups": {"a": {"targets": ["Linear"], "format": "dense", "weights": {"num_bits": 8}}}},
        {"format": "dense", "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8}}}},
    ],
)
def test_configs_without_quantized_weights_are_accepted(
    stated: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = parse({"quantization_config": {"quant_method": "compressed-tensors", **stated}})
    with caplog.at_level("INFO"):
        assert not find_modules(config, StoredTensors({f"{_NAME}.weight": torch.ones(8, 32)}))
    assert config.format_of(_NAME, 8, 32) is None
    assert bool(caplog.records) == ("input_activations" in str(stated))
    stored = _stored(Compressed({"num_bits": 4, "group_size": 32}))
    with pytest.raises(WeightsError, match="not according to quantization_config"):
        find_modules(config, stored)


def test_group_without_weights_leaves_its_modules_unquantized() -> None:
    """Another group also matches them, less specifically."""
    groups = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 8}},
        "one": {"targets": [_NAME], "output_activations": {"num_bits": 8}},
    }
    config = parse({"quantization_config": {"config_groups": groups}})
    assert config.format_of(_NAME, 8, 32) is None
    assert config.format_of("model.layers.1.mlp.up_proj", 8, 32) is not None


def _damaged(damage: str, case: Compressed) -> StoredTensors:
    stored = _stored(case)
    tensors = stored.tensors
    part, _, kind = damage.partition(" ")
    name = f"{_NAME}.{part}"
    match kind:
        case "missing":
            del tensors[name]
        case "of another dtype":
            tensors[name] = tensors[name].to(torch.float64)
        case "cut":
            tensors[name] = tensors[name][..., :-1].clone() if tensors[name].dim() > 1 else tensors[name][:-1]
        case "in one row":
            tensors[name] = tensors[name][:1].clone()
        case "without elements":
            tensors[name] = tensors[name][..., :0].clone()
        case "too large":
            tensors[name] = torch.tensor([40, 2**40])
        case "negative":
            tensors[name] = torch.tensor([-1, -128])
        case _:
            raise AssertionError(kind)
    return stored


@pytest.mark.parametrize(
    "damage",
    [
        *(f"weight_scale {kind}" for kind in ("missing", "of another dtype", "cut", "in one row", "without elements")),
        *(f"weight_packed {kind}" for kind in ("missing", "of another dtype", "cut", "without elements")),
        *("weight_zero_point missing", "weight_zero_point of another dtype", "weight_zero_point cut"),
        *("weight_zero_point in one row", "weight_zero_point without elements"),
        *("weight_shape too large", "weight_shape negative", "weight_shape cut", "weight_shape of another dtype"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_refused_with_a_short_message(damage: str) -> None:
    case = Compressed({"num_bits": 4, "group_size": 32, "symmetric": False})
    with pytest.raises(WeightsError, match=_NAME) as error:
        find_modules(_config(case), _damaged(damage, case))
    assert len(str(error.value)) < 400


def test_too_large_integers_are_refused() -> None:
    case = Compressed({"num_bits": 4, "group_size": 32}, format="naive-quantized")
    case.tensors["weight"][3, 5] = 8
    (module,) = find_modules(_config(case), _stored(case)).values()
    with pytest.raises(WeightsError, match="more than 4 bits"):
        module.rows(whole(module))


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("W4A16 float16", "weight"),
        ("W4A16 float16", "weight_global_scale"),
        ("W8A8", "weight_global_scale"),
        ("FP8 rows", "weight_global_scale"),
        ("MXFP4", "weight_global_scale"),
        ("NVFP4", "weight"),
    ],
)
def test_unused_tensors_of_a_module_are_refused(case: str, part: str) -> None:
    made = Compressed(**CASES[case])
    stored = _stored(made)
    stored.tensors[f"{_NAME}.input_scale"] = stored.tensors[f"{_NAME}.input_global_scale"] = torch.ones(1)
    assert find_modules(_config(made), stored)
    stored.tensors[f"{_NAME}.{part}"] = torch.ones(1)
    with pytest.raises(WeightsError, match=rf"{_NAME}\.{part} does not belong"):
        find_modules(_config(made), stored)


@pytest.mark.parametrize("zero_point", [8, -9, 127])
def test_too_large_zero_points_are_refused(zero_point: int) -> None:
    case = Compressed({"num_bits": 4, "group_size": 32, "symmetric": False}, format="naive-quantized")
    stored = _stored(case)
    stored.tensors[f"{_NAME}.weight_zero_point"][3, 1] = zero_point
    (module,) = find_modules(_config(case), stored).values()
    with pytest.raises(WeightsError, match="weight_zero_point holds integers of more than 4 bits"):
        module.rows(whole(module))


def test_symmetric_weights_refuse_nonzero_zero_points() -> None:
    case = Compressed({"num_bits": 8, "strategy": "channel"}, format="int-quantized")
    stored = _stored(case)
    stored.tensors[f"{_NAME}.weight_zero_point"] = torch.zeros(40, 1, dtype=torch.int8)
    assert find_modules(_config(case), stored)
    stored.tensors[f"{_NAME}.weight_zero_point"][3] = 1
    with pytest.raises(WeightsError, match="symmetric"):
        find_modules(_config(case), stored)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FP8 tensor", "the checkpoint's scales of activations are not used; each token has its own"),
        ("W8A8 asymmetric", "activations are not quantized, although config.json states int8 for each token"),
    ],
)
def test_activation_scales_are_ignored_and_logged(name: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    case = Compressed(**CASES[name])
    stored = _stored(case)
    stored.tensors[f"{_NAME}.input_scale"] = torch.ones(1)
    others = {"model.layers.0.self_attn.k_scale": torch.ones(1), "model.norm.weight": torch.ones(3)}
    stored.tensors |= others
    stored.tensors["model.layers.0.self_attn.k_proj.output_scale"] = torch.ones(1)
    with caplog.at_level("INFO"):
        modules = find_modules(_config(case), stored)
    assert [record.getMessage() for record in caplog.records] == [message]
    assert list(modules) == [_NAME]
    assert modules[_NAME].tensors == {name for name in stored.tensors if name.startswith(f"{_NAME}.")}


def test_quantized_module_without_a_scheme_is_refused() -> None:
    case = Compressed({"num_bits": 4, "group_size": 32})
    with pytest.raises(WeightsError, match="not according to quantization_config"):
        find_modules(_config(case, ignore=[_NAME]), _stored(case))
