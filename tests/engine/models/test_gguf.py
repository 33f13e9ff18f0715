"""Reading GGUF: long arrays are passed over without losing the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFWriter

from stoker_engine.contract.errors import ModelError
from stoker_engine.models.gguf import GGUFFile


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


@pytest.mark.parametrize("endian", [GGUFEndian.LITTLE, GGUFEndian.BIG])
def test_what_follows_a_long_array_is_found(tmp_path: Path, endian: GGUFEndian) -> None:
    file = GGUFFile(_write(tmp_path / "model.gguf", endian))
    assert file.field("tokenizer.ggml.eos_token_id") == 7
    assert file.names() == ["token_embd.weight"]
    if endian is GGUFEndian.LITTLE:
        assert torch.equal(file.read("token_embd.weight"), torch.arange(96.0).reshape(3, 32))


def test_an_architecture_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="mamba"):
        GGUFFile(_write(tmp_path / "model.gguf", architecture="mamba")).config()
