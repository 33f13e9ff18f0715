"""Files beside config.json supply fields that it lacks."""

from __future__ import annotations

import codecs
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker_common.errors import ModelError
from stoker_engine.architectures.model_config import read_config
from stoker_engine.architectures.quantization.read import read_quantization

MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _write(folder: Path, config: dict[str, Any], **files: Any) -> dict[str, Any]:
    for name, value in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return read_config(folder)


def _index(**weights: str) -> dict[str, Any]:
    return {"weight_map": weights}


def test_hf_quant_config_is_read_if_config_has_no_quantization(tmp_path: Path) -> None:
    found = read_quantization(_write(tmp_path, CONFIG, hf_quant_config=MODELOPT))
    assert found is not None and found.method == "modelopt"
    assert found.format_of("lm_head", 32, 32) is None
    stated = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    found = read_quantization(_write(tmp_path, stated, hf_quant_config=MODELOPT))
    assert found is not None and found.method == "fp8"
    cache = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert read_quantization(_write(tmp_path, CONFIG, hf_quant_config=cache)) is None
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: quantization must be an object"):
        _write(tmp_path, CONFIG, hf_quant_config={"quantization": []})


@pytest.mark.parametrize(("dtype", "indexed", "inner"), list(product(DTYPES, (False, True), (False, True))))
def test_dtype_is_that_of_most_elements_of_the_first_file(
    dtype: str, indexed: bool, inner: bool, tmp_path: Path
) -> None:
    other = torch.float16 if dtype == "float32" else torch.float32
    first = {
        "embed": torch.zeros(4, 8, dtype=DTYPES[dtype]),
        "scales": torch.zeros(4, dtype=other),
        "codes": torch.zeros(99, dtype=torch.uint8),
    }
    save_file(first, tmp_path / ("b.safetensors" if indexed else "model.safetensors"))
    save_file({"last": torch.zeros(99, dtype=other)}, tmp_path / ("c.safetensors" if indexed else "x.safetensors"))
    files = {"model.safetensors.index": _index(last="c.safetensors", embed="b.safetensors")} if indexed else {}
    config = {**CONFIG, "text_config": {"hidden_size": 8, "dtype": None}} if inner else CONFIG
    assert _write(tmp_path, config, **files)["dtype"] == dtype
    for stated in ({"dtype": "float64"}, {"torch_dtype": "float64"}, {"text_config": {"torch_dtype": "float64"}}):
        given = {**CONFIG, **stated}
        assert _write(tmp_path, given, **files) == given


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 9, b"\2\0\0\0\0\0\0\0[]", b"\3\0\0\0\0\0\0\0{"])
def test_file_without_a_header_is_ignored(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert _write(tmp_path, CONFIG) == CONFIG


def test_byte_order_marks_are_ignored(tmp_path: Path) -> None:
    files = {
        "generation_config": {"eos_token_id": [7, 9]},
        "hf_quant_config": MODELOPT,
        "model.safetensors.index": _index(embed="b.safetensors"),
    }
    save_file({"embed": torch.zeros(4, 8, dtype=torch.float16)}, tmp_path / "b.safetensors")
    plain = _write(tmp_path, CONFIG, **files)
    assert plain["eos_token_id"] == [7, 9] and plain["dtype"] == "float16" and plain["quantization_config"] == MODELOPT
    for file in tmp_path.glob("*.json"):
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
        assert read_config(tmp_path) == plain, file.name
