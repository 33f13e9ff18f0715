"""GPTQ's and AWQ's matrices, compared with GPTQModel's dequantization, and with tensors packed bit by bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.quantization import awq as awq_config
from stoker_engine.architectures.quantization import gptq as gptq_config
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.kernels.group_blocks import dequantize
from stoker_engine.quant.checkpoints import awq, gptq
from stoker_engine.quant.checkpoints.grouped_matrix import GroupedMatrix
from stoker_engine.quant.checkpoints.module import Part

from .packed_words import Quantized
from .stored_tensors import StoredTensors, whole

#: Recorded with GPTQModel 7.7: its tensors, and the results of its ``dequantize_weight`` with float32 scales.
_RECORDED = Path(__file__).parent / "recorded"
_METHODS: dict[str, tuple[Any, Any]] = {"gptq": (gptq_config, gptq), "awq": (awq_config, awq)}
_Q = "model.layers.0.self_attn.q_proj"


def _recorded() -> list[Any]:
    cases = []
    for method in _METHODS:
        with safe_open(_RECORDED / f"{method}.safetensors", "pt") as file:
            configs = json.loads(file.metadata()["configs"])
            for name, config in configs.items():
                tensors = {key: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}.")}  # noqa: SIM118
                cases.append(pytest.param(name, config, tensors, id=f"{method} {name}"))
    return cases


def _find(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, GroupedMatrix]:
    parser, finder = _METHODS[config.get("quant_method", "gptq")]
    found: dict[str, GroupedMatrix] = finder.find_modules(
        parser.parse({"quantization_config": config}), StoredTensors(tensors)
    )
    return found


def _elements(module: GroupedMatrix, part: Part | None = None) -> torch.Tensor:
    """Return a part's dequantized elements, with columns in the matrix's order."""
    part = part or whole(module)
    stored = dequantize(module.rows(part), module.format, part[1].stop - part[1].start, torch.float32)
    columns = module.columns()
    return stored if columns is None else torch.empty_like(stored).index_copy_(1, columns, stored)


def _gptq(matrix: Quantized, **config: Any) -> dict[str, Any]:
    stated = {"bits": matrix.bits, "group_size": matrix.group, "sym": matrix.symmetric, "desc_act": matrix.act_order}
    return {"quant_method": "gptq", **stated, **config}


def _awq(matrix: Quantized, **config: Any) -> dict[str, Any]:
    stated = {"w_bit": 4, "q_group_size": matrix.group, "zero_point": not matrix.symmetric, "version": "GEMM"}
    return {"quant_method": "awq", **stated, **config}


@pytest.mark.parametrize(("name", "config", "tensors"), _recorded())
def test_recorded_matrices_equal_those_of_gptqmodel(
    name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    expected = tensors.pop(f"{name}.dequantized")
    (module,) = _find(config, tensors).values()
    assert torch.equal(_elements(module), expected)
    assert module.tensors == tensors.keys()
    planned = _METHODS[config["quant_method"]][0].parse({"quantization_config": config}).format_of(_Q, *module.shape)
    assert module.format == planned


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [16, 48, -1])
@pytest.mark.parametrize(("outputs", "inner"), [(32, 96), (8, 160), (1, 32), (33, 64)])
def test_matrices_of_every_size_equal_their_values(bits: int, group: int, outputs: int, inner: int) -> None:
    for symmetric, act_order, version in ((False, False, "gptq"), (True, True, "gptq_v2"), (False, True, "gptq")):
        matrix = Quantized(outputs, inner, bits, group, symmetric, act_order, seed=bits * inner + group)
        config = _gptq(matrix, checkpoint_format=version)
        module = _find(config, matrix.gptq(_Q, version == "gptq"))[_Q]
        assert torch.equal(_elements(module), matrix.weight)
        in_order = "groups" if act_order and 0 < group < inner else "columns"
        size = group if 0 < group < inner else 0
        assert module.format == GroupFormat(f"uint{bits}", size, "float16", not symmetric, in_order_of=in_order)  # type: ignore[arg-type]
        if outputs % 8 == 0 and bits == 4 and not act_order:
            assert torch.equal(_elements(_find(_awq(matrix), matrix.awq(_Q))[_Q]), matrix.weight)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_parts_read_only_their_bytes(method: str, bits: int) -> None:
    if method == "awq" and bits != 4:
        pytest.skip("AWQ has only 4 bits")
    matrix = Quantized(96, 160, bits, 32)
    tensors = StoredTensors(matrix.gptq(_Q) if method == "gptq" else matrix.awq(_Q))
    config = _gptq(matrix) if method == "gptq" else _awq(matrix)
    parser, finder = _METHODS[method]
    module = finder.find_modules(parser.parse({"quantization_config": config}), tensors)[_Q]
    rng = random.Random(bits)
    for _ in range(40):
        rows, columns = sorted(rng.sample(range(97), 2)), sorted(rng.sample(range(6), 2))
        part = slice(*rows), slice(32 * columns[0], 32 * columns[1])
        tensors.read_bytes = 0
        assert torch.equal(_elements(module, part), matrix.weight[part])
        # Along the packed dimension, up to 31 more codes on either side.
        height, width, groups = part[0].stop - part[0].start, part[1].stop - part[1].start, columns[1] - columns[0]
        limit = (height + 62) * (width * bits / 8 + groups * (2 + bits / 8))
        assert tensors.read_bytes <= limit
    with pytest.raises(WeightsError, match=rf"{_Q} .*cannot be split at columns 16.*--tensor-parallel-size"):
        module.rows((slice(0, 96), slice(16, 64)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_keep_their_dtype(dtype: torch.dtype) -> None:
    matrix = Quantized(16, 64, scale_dtype=dtype)
    for config, tensors in ((_gptq(matrix), matrix.gptq(_Q)), (_awq(matrix), matrix.awq(_Q))):
        module = _find(config, tensors)[_Q]
        assert module.format.scale == str(dtype).removeprefix("torch.")
        assert torch.equal(_elements(module), matrix.weight)


def test_zero_points_and_group_indexes_may_be_missing() -> None:
    matrix = Quantized(16, 64, symmetric=True)
    tensors = matrix.gptq(_Q)
    del tensors[f"{_Q}.qzeros"], tensors[f"{_Q}.g_idx"]
    assert torch.equal(_elements(_find(_gptq(matrix), tensors)[_Q]), matrix.weight)
    tensors = matrix.awq(_Q)
    del tensors[f"{_Q}.qzeros"]
    assert torch.equal(_elements(_find(_awq(matrix), tensors)[_Q]), matrix.weight)


def test_other_tensors_are_ignored() -> None:
    matrix = Quantized(16, 64)
    tensors = {
        **matrix.gptq(_Q), f"{_Q}.bias": torch.zeros(16), "lm_head.weight": torch.zeros(4, 4), "a.scales": torch.ones(1)
    }  # fmt: skip
    found = _find(_gptq(matrix), tensors)
    assert found.keys() == {_Q} and found[_Q].tensors == matrix.gptq(_Q).keys()


def test_zero_points_with_a_borrow_across_a_word_are_read() -> None:
    """GPTQModel subtracts 1 from words as they are; others from each zero point."""
    matrix = Quantized(16, 32)
    matrix.zeros[:] = torch.tensor([0, 0, 5, 15] * 4).unsqueeze(1)
    tensors = matrix.gptq(_Q, less_one=False)
    tensors[f"{_Q}.qzeros"] -= 0x11111111
    by_word = _gptq(matrix, meta={"quantizer": ["gptqmodel:4.0.0"]})
    assert torch.equal(_elements(_find(by_word, tensors)[_Q]), matrix.weight)
    assert torch.equal(_elements(_find(_gptq(matrix), matrix.gptq(_Q))[_Q]), matrix.weight)


def test_modules_may_override_the_settings() -> None:
    config = {
        "bits": 4, "group_size": 32, "sym": False, "lm_head": True,
        "dynamic": {
            r"-:.*\.0\.mlp\.down_proj": {},
            r"+:.*\.0\.mlp\.": {"bits": 8, "group_size": 64},
            r".*\.(?:1[0-5])\.": {"sym": True},
        },
    }  # fmt: skip
    read = gptq_config.parse({"quantization_config": {**config, "quant_method": "gptq"}})
    expected = {
        "model.layers.0.mlp.down_proj": None,
        "model.layers.0.mlp.up_proj": GroupFormat("uint8", 64, "float16", True),
        "model.layers.0.self_attn.o_proj": GroupFormat("uint4", 32, "float16", True),
        "model.layers.12.mlp.up_proj": GroupFormat("uint4", 32, "float16", False),
        "model.layers.2.mlp.gate": None,
        "model.embed_tokens": None,
        "lm_head": GroupFormat("uint4", 32, "float16", True),
    }
    assert {module: read.format_of(module, 64, 128) for module in expected} == expected
    wide = Quantized(8, 128, 8, 64)
    module = _find({**config, "quant_method": "gptq"}, wide.gptq("model.layers.0.mlp.up_proj"))
    assert torch.equal(_elements(module["model.layers.0.mlp.up_proj"]), wide.weight)
    with pytest.raises(WeightsError, match=r"down_proj is quantized, but config\.json"):
        _find({**config, "quant_method": "gptq"}, wide.gptq("model.layers.0.mlp.down_proj"))


def test_only_listed_modules_are_quantized() -> None:
    stated = {"bits": 4, "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.up_proj"]]}
    read = gptq_config.parse({"quantization_config": stated})
    assert read.format_of(_Q, 64, 128) and read.format_of("model.layers.3.mlp.up_proj", 64, 128)
    assert read.format_of("model.layers.3.mlp.down_proj", 64, 128) is None and read.format_of("lm_head", 9, 128) is None
    stated = {"modules_to_not_convert": ["lm_head", "layers.0."], "zero_point": True}
    others = awq_config.parse({"quantization_config": stated})
    assert others.format_of(_Q, 64, 256) is None
    assert others.format_of("model.layers.1.mlp.up_proj", 64, 256) == GroupFormat("uint4", 128, "float16", True)


@pytest.mark.parametrize(
    ("stated", "order"),
    [
        ({"desc_act": True}, "groups"),
        ({"desc_act": True, "static_groups": True}, "columns"),
        ({"desc_act": True, "group_size": -1}, "columns"),
        ({}, "columns"),
    ],
)
def test_act_order_follows_from_the_config(stated: dict[str, Any], order: str) -> None:
    found = gptq_config.parse({"quantization_config": {"bits": 4, **stated}}).format_of(_Q, 64, 256)
    assert found is not None and found.in_order_of == order


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"checkpoint_format": "marlin"}, "'marlin' is not supported; quantize"),
        ({"format": "bitblas"}, "'bitblas' is not supported; quantize"),
        ({"is_marlin_format": True}, "'marlin' is not supported; quantize"),
        ({"checkpoint_format": 7}, "must be a string"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported; quantize"),
        ({"bits": 5}, "5 bits is not supported; quantize.* 2, 3, 4 or 8"),
        ({"bits": None}, "has no 'bits'"),
        ({"bits": "4"}, "bits must be a number"),
        ({"group_size": 20}, "group_size of 20 is not supported; quantize.* multiple of 16"),
        ({"group_size": 0}, "group_size of 0 is not supported"),
        ({"sym": "yes"}, "sym must be true or false"),
        ({"dynamic": []}, "dynamic must be an object"),
        ({"dynamic": {".*": 3}}, "dynamic must hold an object"),
        ({"dynamic": {".*": {"bits": 6}}}, "6 bits is not supported"),
        ({"dynamic": {"(a": {}}}, "a pattern that is not supported"),
        ({"dynamic": {"-:(.*.*)*x": {}}}, "a pattern that is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv' is not supported; .* version gemm"),
        ({"quant_method": "awq", "version": "marlin"}, "'marlin' is not supported"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "'llm-awq' is not supported"),
        ({"quant_method": "awq", "bits": 8}, "8 bits is not supported; quantize.* with 4"),
        ({"quant_method": "awq", "q_group_size": 100}, "group_size of 100 is not supported"),
    ],
)
def test_unsupported_configs_are_refused_with_a_remedy(stated: dict[str, Any], message: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, **stated}
    with pytest.raises(ModelError, match=message):
        _METHODS[config["quant_method"]][0].parse({"quantization_config": config})


def _changed(tensors: dict[str, torch.Tensor], part: str, change: Any) -> dict[str, torch.Tensor]:
    name = f"{_Q}.{part}"
    return {key: change(tensor) if key == name else tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("scales", None, rf"{_Q} is quantized but has no scales"),
        ("qzeros", None, rf"{_Q} is quantized but has no qzeros"),
        ("scales", lambda x: x[:-1], r"scales has shape \(3, 32\), .* needs \(4, 32\)"),
        ("scales", lambda x: x.t(), r"scales has shape"),
        ("scales", lambda x: x.to(torch.int32), r"scales holds int32, but its matrix needs float32 or"),
        ("qzeros", lambda x: x[:, :-1], r"qzeros has shape \(4, 3\)"),
        ("qzeros", lambda x: x.long(), r"qzeros holds int64"),
        ("qweight", lambda x: x.to(torch.int16), r"qweight holds int16"),
        ("qweight", lambda x: x[0], r"qweight has shape .* needs 2 dimensions"),
        ("qweight", lambda x: x[:0], r"has shape|is not a matrix"),
        ("qweight", lambda x: x[:, :0], r"has shape|is not a matrix"),
        ("qweight", lambda x: x[:-20], r"has shape"),
        ("g_idx", lambda x: x + 1, r"g_idx must name 4 groups of 16 columns each; .*group_size"),
        ("g_idx", lambda x: x - 2**30, r"g_idx must name 4 groups"),
        ("g_idx", lambda x: x * 0, r"g_idx must name 4 groups"),
        ("g_idx", lambda x: x.float(), r"g_idx holds float32"),
        ("g_idx", lambda x: x[:-9], r"has shape"),
        ("g_idx", lambda x: x.view(8, 8), r"g_idx has shape .* needs 1 dimensions"),
    ],
)
def test_damaged_tensors_are_refused_by_name(part: str, change: Any, message: str) -> None:
    matrix = Quantized(32, 64)
    for config, tensors in ((_gptq(matrix), matrix.gptq(_Q)), (_awq(matrix), matrix.awq(_Q))):
        if f"{_Q}.{part}" not in tensors:
            continue
        if change is None:
            tensors.pop(f"{_Q}.{part}")
        else:
            tensors = _changed(tensors, part, change)
        with pytest.raises(WeightsError, match=message):
            _find(config, tensors)


def test_symmetric_weights_refuse_other_zero_points() -> None:
    matrix = Quantized(16, 64)
    for config, tensors, remedy in (
        (_gptq(matrix, sym=True), matrix.gptq(_Q), '"sym": false'),
        (_awq(matrix, zero_point=False), matrix.awq(_Q), '"zero_point": true'),
    ):
        module = _find(config, tensors)[_Q]
        with pytest.raises(WeightsError, match=rf"{_Q}.qzeros holds zero points other than 8.*{remedy}"):
            module.rows(whole(module))
