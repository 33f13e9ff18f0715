"""bitsandbytes' matrices, compared with the library's dequantization."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.quantization.bitsandbytes import parse
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.kernels.group_blocks import dequantize
from stoker_engine.quant.checkpoints.bitsandbytes import find_modules
from stoker_engine.quant.checkpoints.grouped_matrix import GroupedMatrix
from stoker_engine.quant.checkpoints.module import Part

from .stored_tensors import StoredTensors, whole

#: Recorded with bitsandbytes 0.50: its tensors, and the results of its code for any device. (Its code for CPUs misses
#: the scales of rows that are no multiple of a block.)
_RECORDED = Path(__file__).parent / "recorded" / "bitsandbytes.safetensors"
_STATE = "quant_state.bitsandbytes__nf4"


def _recorded() -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    with safe_open(_RECORDED, "pt") as file:
        configs = json.loads(file.metadata()["configs"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return {
        name: (config, {key: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")})
        for name, config in configs.items()
    }


_CASES = _recorded()
#: Stoker's format for the matrix of each case.
_FORMATS = {
    "blocks": GroupFormat("nf4", 64, "float32"),
    "nested": GroupFormat("nf4", 64, "float32"),
    "across_rows": GroupFormat("nf4", 16, "float32"),
    "short_rows": GroupFormat("nf4", 0, "float32"),
    "larger": GroupFormat("nf4", 128, "float32"),
    "eight": GroupFormat("int8", 0, "float32"),
}


def _case(name: str) -> tuple[GroupedMatrix, torch.Tensor, StoredTensors]:
    config, tensors = _CASES[name]
    source = StoredTensors({key: tensor for key, tensor in tensors.items() if not key.endswith("dequantized")})
    found = find_modules(parse({"quantization_config": config}), source)
    return found[name], tensors[f"{name}.dequantized"], source


def _elements(module: GroupedMatrix, part: Part) -> torch.Tensor:
    return dequantize(module.rows(part), module.format, part[1].stop - part[1].start, torch.float32)


def _assert_equal(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if name == "eight":  # bitsandbytes multiplies by a rounded 1 / 127
        torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", _FORMATS)
def test_recorded_matrices_equal_those_of_the_library(name: str) -> None:
    module, expected, source = _case(name)
    assert module.format == _FORMATS[name] and module.shape == expected.shape
    assert module.tensors == source.tensors.keys()
    _assert_equal(_elements(module, whole(module)), expected, name)
    if name != "larger":  # the size of blocks is not in config.json
        config = parse({"quantization_config": _CASES[name][0]})
        assert config.format_of("model.layers.0.mlp.up_proj", *module.shape) == module.format


@pytest.mark.parametrize("name", _FORMATS)
def test_parts_read_only_their_bytes(name: str) -> None:
    module, expected, source = _case(name)
    rng, multiple = random.Random(0), module.format.column_multiple
    outputs, inner = module.shape
    bits, scale = (8, 4) if name == "eight" else (4, 4)
    for _ in range(30):
        rows = sorted(rng.sample(range(outputs + 1), 2))
        columns = [multiple * each for each in sorted(rng.sample(range(inner // multiple + 1), 2))]
        part = slice(*rows), slice(*columns)
        source.read_bytes = 0
        _assert_equal(_elements(module, part), expected[part], name)
        # Whole rows, and what does not depend on the part: two tables, and one more block at each end.
        width = columns[1] - columns[0] if name == "eight" else inner
        groups = 1 if name == "eight" else inner / 32
        assert source.read_bytes <= (rows[1] - rows[0]) * (width * bits / 8 + groups * scale) + 256 * 4 + 64


def test_skipped_modules_have_no_format() -> None:
    both = {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp", "o_proj"]}
    read = parse({"quantization_config": both})
    rows = GroupFormat("int8", 0, "float32")
    expected = {
        "model.layers.0.mlp.up_proj": rows,
        "model.layers.1.mlp.up_proj": None,
        "model.layers.11.mlp.up_proj": rows,
        "model.layers.0.self_attn.o_proj": None,
        "model.embed_tokens": None,
        "lm_head": None,
    }
    assert {module: read.format_of(module, 64, 64) for module in expected} == expected
    assert parse({"quantization_config": {"load_in_8bit": True}}).format_of("lm_head", 64, 64) is None
    read = parse({"quantization_config": {"_load_in_8bit": True, "llm_int8_skip_modules": []}})
    assert read.format_of("lm_head", 64, 64) == rows


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, "either load_in_8bit or load_in_4bit"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "either load_in_8bit or load_in_4bit"),
        ({"load_in_4bit": True}, "'fp4' is not supported; quantize the model again to nf4 or 8 bits"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": 4}, "must be a string"),
        ({"load_in_8bit": "yes"}, "must be true or false"),
        ({"load_in_8bit": True, "llm_int8_skip_modules": "lm_head"}, "must be a list of str"),
    ],
)
def test_unsupported_configs_are_refused_with_a_remedy(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse({"quantization_config": stated})


def test_rows_that_are_no_multiple_of_16_are_refused() -> None:
    read = parse({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}})
    with pytest.raises(ModelError, match=r"up_proj has rows of 40 values.*not a multiple of 16; .*load_in_8bit"):
        read.format_of("model.layers.0.mlp.up_proj", 64, 40)


def _state(**changes: Any) -> torch.Tensor:
    state = json.loads(bytes(_CASES["nested"][1][f"nested.weight.{_STATE}"].tolist()))
    return torch.tensor(list(json.dumps({**state, **changes}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("weight", None, "nested is quantized but has no weight"),
        ("weight.absmax", None, "nested is quantized but has no weight.absmax"),
        ("weight.quant_map", None, "has no weight.quant_map"),
        ("weight.nested_quant_map", None, "has no weight.nested_quant_map"),
        ("weight.nested_absmax", None, r"absmax holds uint8, but its matrix needs float32"),
        ("weight.absmax", torch.zeros(3, dtype=torch.uint8), r"absmax has shape \(3,\)"),
        ("weight.nested_absmax", torch.zeros(9), r"nested_absmax has shape \(9,\)"),
        ("weight.nested_absmax", torch.zeros(2, dtype=torch.int64), r"nested_absmax holds int64"),
        ("weight.quant_map", torch.linspace(-1, 1, 16), r"quant_map is not the table of nf4"),
        ("weight", torch.zeros(9, 1, dtype=torch.uint8), r"nested.weight has shape \(9, 1\)"),
        ("weight", torch.zeros(96, 192, dtype=torch.int64), r"nested.weight holds int64"),
        (f"weight.{_STATE}", torch.zeros(9, dtype=torch.uint8), "does not hold JSON"),
        (f"weight.{_STATE}", torch.zeros(9), "does not hold JSON"),
        (f"weight.{_STATE}", torch.tensor([91, 93], dtype=torch.uint8), "does not hold a JSON object"),
        (f"weight.{_STATE}", torch.full((9999,), 32, dtype=torch.uint8), "does not hold JSON"),
        (f"weight.{_STATE}", _state(shape=[96]), r"which is not a matrix"),
        (f"weight.{_STATE}", _state(shape=[-96, 192]), r"which is not a matrix"),
        (f"weight.{_STATE}", _state(shape=[10**30, 192]), r"which is not a matrix|Overflow"),
        (f"weight.{_STATE}", _state(shape="x"), r"shape must be a list"),
        (f"weight.{_STATE}", _state(shape=[96, 40]), r"rows of 40 values"),
        (f"weight.{_STATE}", _state(shape=[96, 256]), r"has shape"),
        (f"weight.{_STATE}", _state(blocksize=0), r"blocksize must be a number from 32"),
        (f"weight.{_STATE}", _state(blocksize=128), r"absmax has shape"),
        (f"weight.{_STATE}", _state(nested_blocksize=7), r"nested_absmax has shape"),
        (f"weight.{_STATE}", _state(nested_offset=None), r"no 'nested_offset'"),
    ],
)
def test_damaged_tensors_are_refused_by_name(end: str, tensor: torch.Tensor | None, message: str) -> None:
    config, tensors = _CASES["nested"]
    changed = {key: stored for key, stored in tensors.items() if not key.endswith("dequantized")}
    changed.pop(f"nested.{end}")
    if tensor is not None:
        changed[f"nested.{end}"] = tensor
    with pytest.raises(WeightsError, match=message):
        find_modules(parse({"quantization_config": config}), StoredTensors(changed))


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("weight", None, "eight is quantized but has no weight"),
        ("weight", torch.zeros(24, 48), "weight holds float32, but its matrix needs int8"),
        ("weight", torch.zeros(24 * 48, dtype=torch.int8), "needs 2 dimensions"),
        ("weight", torch.zeros(24, 0, dtype=torch.int8), "is not a matrix"),
        ("SCB", torch.zeros(23), r"SCB has shape \(23,\), .* needs \(24,\)"),
        ("SCB", torch.zeros(24, dtype=torch.int32), "SCB holds int32"),
        ("weight_format", torch.tensor(2, dtype=torch.uint8), "not stored by rows are not supported"),
    ],
)
def test_damaged_rows_are_refused_by_name(end: str, tensor: torch.Tensor | None, message: str) -> None:
    config, tensors = _CASES["eight"]
    changed = {key: stored for key, stored in tensors.items() if not key.endswith("dequantized")}
    changed.pop(f"eight.{end}")
    if tensor is not None:
        changed[f"eight.{end}"] = tensor
    with pytest.raises(WeightsError, match=message):
        find_modules(parse({"quantization_config": config}), StoredTensors(changed))


def test_fp4_is_refused_by_name() -> None:
    config, tensors = _CASES["blocks"]
    tensors = {key.replace("__nf4", "__fp4"): tensor for key, tensor in tensors.items()}
    with pytest.raises(WeightsError, match=r"blocks is stored as 'fp4', not as nf4; quantize"):
        find_modules(parse({"quantization_config": config}), StoredTensors(tensors))
