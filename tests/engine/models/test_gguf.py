"""GGUF files: metadata, dtypes, dequantization and splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from gguf.quants import dequantize, quantize

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.models.gguf.gguf_file import GGUFFile
from stoker_engine.quant.weight_target import WeightTarget


def _write(path: Path, endian: GGUFEndian = GGUFEndian.LITTLE, architecture: str = "gemma3") -> Path:
    writer = GGUFWriter(path, architecture, endianess=endian)
    writer.add_token_list([f"token {i} ü" for i in range(5000)])
    writer.add_token_scores([float(i) for i in range(5000)])
    writer.add_eos_token_id(7)
    writer.add_tensor("token_embd.weight", np.arange(96, dtype=np.float32).reshape(3, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_after_a_long_array_are_found(tmp_path: Path) -> None:
    file = GGUFFile(_write(tmp_path / "model.gguf"))
    assert file.field("tokenizer.ggml.eos_token_id") == 7
    assert file.names() == ["token_embd.weight"]
    assert torch.equal(file.read("token_embd.weight"), torch.arange(96.0).reshape(3, 32))


def test_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="mamba"):
        GGUFFile(_write(tmp_path / "model.gguf", architecture="mamba")).config()


@pytest.mark.parametrize(
    ("embedding", "matrix", "dtype"),
    [
        (GGMLQuantizationType.F32, GGMLQuantizationType.F32, "float32"),
        (GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, "bfloat16"),
        (GGMLQuantizationType.F16, GGMLQuantizationType.F32, "bfloat16"),
        (GGMLQuantizationType.BF16, GGMLQuantizationType.BF16, "bfloat16"),
    ],
)
def test_dtype_is_bfloat16_unless_all_matrices_are_float32(
    tmp_path: Path, embedding: GGMLQuantizationType, matrix: GGMLQuantizationType, dtype: str
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_feed_forward_length(64)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", quantize(np.ones((8, 64), dtype=np.float32), embedding), raw_dtype=embedding)
    writer.add_tensor("blk.0.attn_q.weight", quantize(np.ones((64, 64), dtype=np.float32), matrix), raw_dtype=matrix)
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(tmp_path / "model.gguf").config().dtype == dtype


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="big-endian"):
        GGUFFile(_write(tmp_path / "model.gguf", GGUFEndian.BIG))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0, GGMLQuantizationType.BF16])
def test_tensors_are_dequantized_piece_by_piece(
    tmp_path: Path, kind: GGMLQuantizationType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_engine.models.gguf.gguf_tensor._PIECE", 256)
    values = np.random.default_rng(0).standard_normal((3, 50, 64), dtype=np.float32)
    packed = quantize(values, kind)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("t", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "model.gguf")
    expected = torch.from_numpy(dequantize(packed, kind).reshape(values.shape))
    assert torch.equal(file.read("t"), expected)
    with torch.inference_mode():
        target = torch.empty(values.shape, dtype=dtype)
        file.read_into("t", WeightTarget.whole(target))
        assert torch.equal(target, expected.to(dtype))
        with pytest.raises(WeightsError, match="shape"):
            file.read_into("t", WeightTarget.whole(torch.empty(3, 50, 63)))


def test_a_split_file_is_read_from_its_first_part(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    for name in ("a", "b", "c"):
        writer.add_tensor(name, np.full((2, 32), ord(name), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "model-00001-of-00003.gguf")
    assert {name: float(file.read(name)[0, 0]) for name in file.names()} == {"a": 97, "b": 98, "c": 99}
    with pytest.raises(ModelError, match="first part"):
        GGUFFile(tmp_path / "model-00002-of-00003.gguf")


def test_file_without_a_models_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="block_count"):
        GGUFFile(_write(tmp_path / "model.gguf", architecture="llama")).config()
