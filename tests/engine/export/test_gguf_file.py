"""GGUF files written by ``stoker quantize``, checked with the gguf library's reader and arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from stoker_common.errors import ArgumentError, ModelError, WeightsError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.export.gguf_file import FILE_TYPES, export
from stoker_engine.export.output import check_new
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.gguf.gguf_file import GGUFFile

from ...support.engine.tiny_configs import BLOCK_SIZES, GGUF
from ...support.engine.tiny_models import random_model
from ..models import llama_cpp


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stacked experts, and down projections with rows that are no multiples of 32."""
    options = {**GGUF["qwen2_moe"][1], "hidden_size": 64}
    folder = tmp_path_factory.mktemp("gguf")
    return Path(llama_cpp.write(random_model("qwen2_moe", options), folder / "mixture.gguf"))


def _tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def _elements(tensor: gguf.ReaderTensor) -> Any:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("kind", FILE_TYPES, ids=lambda kind: kind.name)
def test_exported_tensors_equal_those_of_the_library(kind: Kind, mixture: Path, tmp_path: Path) -> None:
    export(mixture, kind, tmp_path / "new.gguf")
    before, after = _tensors(mixture), _tensors(tmp_path / "new.gguf")
    assert list(before) == list(after)
    kinds = set()
    for name, tensor in after.items():
        elements = _elements(before[name])
        assert tensor.shape.tolist() == before[name].shape.tolist()
        if "norm" in name or "ffn_gate_inp" in name or name.endswith(".bias"):
            assert tensor.tensor_type == before[name].tensor_type
            assert np.array_equal(_elements(tensor), elements)
            continue
        expected_kind = (
            Kind.Q8_0 if kind not in (Kind.F16, Kind.BF16) and name in ("token_embd.weight", "output.weight") else kind
        )
        if gguf.GGML_QUANT_SIZES[expected_kind][0] > 1 and elements.shape[-1] % 32:
            expected_kind = Kind.F32
        kinds.add(expected_kind)
        assert tensor.tensor_type == expected_kind
        assert np.array_equal(
            tensor.data.view(np.uint8).ravel(), gguf.quants.quantize(elements, expected_kind).view(np.uint8).ravel()
        )
    assert kind in kinds


def test_metadata_is_kept(mixture: Path, tmp_path: Path) -> None:
    export(mixture, Kind.Q4_0, tmp_path / "folder")
    (path,) = (tmp_path / "folder").iterdir()
    assert path.name == "mixture-Q4_0.gguf"
    before, after = gguf.GGUFReader(mixture).fields, gguf.GGUFReader(path).fields
    own = {"general.file_type": 2, "general.quantization_version": 2, "general.alignment": 32}
    for key, value in own.items():
        assert after[key].contents() == value
    same = {key for key in before if not key.startswith("GGUF.")} - own.keys()
    assert same == {key for key in after if not key.startswith("GGUF.")} - own.keys()
    for key in same:
        assert after[key].types == before[key].types
        assert after[key].contents() == before[key].contents()


def test_tensors_written_in_pieces_are_dequantized_as_by_the_library(tmp_path: Path) -> None:
    """A large tensor is written in several pieces; the file is the same as with one."""
    path = Path(llama_cpp.write(random_model("llama", BLOCK_SIZES), tmp_path / "model.gguf"))
    export(path, Kind.Q8_0, tmp_path / "whole.gguf")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("stoker_engine.export.gguf_file._PIECE", 200)
        export(path, Kind.Q8_0, tmp_path / "pieces.gguf")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "pieces.gguf").read_bytes()
    ours = GGUFFile(tmp_path / "whole.gguf")
    for name, tensor in _tensors(tmp_path / "whole.gguf").items():
        assert np.array_equal(ours.read(name).numpy().ravel(), _elements(tensor).ravel())


def test_quantized_files_are_only_exported_to_float_types(mixture: Path, tmp_path: Path) -> None:
    export(mixture, Kind.Q5_0, tmp_path / "q5.gguf")
    with pytest.raises(ModelError, match=r"already quantized by Q5_0, but Q4_1 is requested.*--to bf16"):
        export(tmp_path / "q5.gguf", Kind.Q4_1, tmp_path / "q4.gguf")
    export(tmp_path / "q5.gguf", Kind.BF16, tmp_path / "bf16.gguf")
    before, after = _tensors(tmp_path / "q5.gguf"), _tensors(tmp_path / "bf16.gguf")
    name = "blk.0.attn_q.weight"
    assert before[name].tensor_type == Kind.Q5_0 and after[name].tensor_type == Kind.BF16
    assert np.allclose(_elements(after[name]), _elements(before[name]), rtol=2**-8)
    assert {path.name for path in tmp_path.iterdir()} == {"q5.gguf", "bf16.gguf"}


def test_types_of_layers_decide_whether_a_file_is_already_quantized(tmp_path: Path) -> None:
    """The embedding has another type, and most of the elements."""
    large = random_model("llama", {**BLOCK_SIZES, "vocab_size": 4096})

    def layers_of(kind: Kind, ends: Kind, name: str) -> Path:
        stored = lambda tensor: kind if tensor.startswith("blk.") else ends  # noqa: E731
        return Path(llama_cpp.write(large, tmp_path / name, stored=stored))

    path = layers_of(Kind.Q5_1, Kind.F16, "layers.gguf")
    with pytest.raises(ModelError, match="already quantized by Q5_1, but Q4_0 is requested"):
        export(path, Kind.Q4_0, tmp_path / "new.gguf")
    with pytest.raises(ArgumentError, match="int4 is requested, but the checkpoint is already quantized by Q5_1"):
        find_checkpoint(EngineArgs(model=str(path), quantization="int4"))
    path = layers_of(Kind.F16, Kind.Q8_0, "ends.gguf")
    export(path, Kind.Q4_0, tmp_path / "new.gguf")
    assert _tensors(tmp_path / "new.gguf")["blk.0.attn_q.weight"].tensor_type == Kind.Q4_0
    assert find_checkpoint(EngineArgs(model=str(path), quantization="int4")).loader.on_load is not None


def test_file_without_matrices_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="holds no matrix that can be of type Q4_0, among 0 tensors"):
        export(path, Kind.Q4_0, tmp_path / "new.gguf")
    for quantization in (None, "int8"):
        with pytest.raises(ModelError, match=r"has no token_embd\.weight"):
            find_checkpoint(EngineArgs(model=str(path), quantization=quantization))


def test_folder_named_like_the_output_file_is_refused(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").mkdir()
    (tmp_path / "x").mkdir()
    check_new(tmp_path / "x")
    monkeypatch.setattr("stoker_engine.export.gguf_file._write", None)
    with pytest.raises(ArgumentError, match=r"x\.gguf exists; remove it"):
        export(mixture, Kind.Q8_0, tmp_path / "x.gguf")


#: (type, largest value whose scale fits in float16, a value that is too large)
_LARGE = [
    (Kind.Q8_0, 65000.0 * 127, 66000.0 * 127),
    (Kind.Q5_0, 65000.0 * 16, 66000.0 * 16),
    (Kind.Q4_0, 65000.0 * 8, 66000.0 * 8),
    (Kind.Q5_1, 65000.0 * 31, 66000.0 * 31),
    (Kind.Q4_1, 65000.0 * 15, -66000.0),
    (Kind.F16, 65504.0, 65520.0),
]


@pytest.mark.parametrize("kind, fits, too_large", _LARGE, ids=lambda value: getattr(value, "name", ""))
def test_values_whose_scale_exceeds_float16_are_refused(
    kind: Kind, fits: float, too_large: float, tmp_path: Path
) -> None:
    for value in (fits, too_large):
        model = random_model("llama", BLOCK_SIZES)
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
        path = Path(llama_cpp.write(model, tmp_path / "model.gguf"))
        if value == too_large:
            with pytest.raises(WeightsError, match=rf"blk.1.ffn_up.weight .* too large for {kind.name}; choose bf16"):
                export(path, kind, tmp_path / "too large.gguf")
        else:
            export(path, kind, tmp_path / "new.gguf")
            assert np.isfinite(_elements(_tensors(tmp_path / "new.gguf")["blk.1.ffn_up.weight"])).all()


def test_nan_infinity_and_existing_outputs_are_refused(mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="exists"):
        export(mixture, Kind.Q8_0, mixture)
    for value, kind, message in (
        (torch.nan, Kind.Q8_0, "nan or infinity"),
        (torch.inf, Kind.F16, "nan or infinity"),
        (70000.0, Kind.F16, "too large for F16; choose bf16"),
    ):
        model = random_model("llama", BLOCK_SIZES)
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
        path = Path(llama_cpp.write(model, tmp_path / "model.gguf"))
        with pytest.raises(WeightsError, match=f"blk.1.ffn_up.weight holds .*{message}"):
            export(path, kind, tmp_path / "new.gguf")
        assert list(tmp_path.iterdir()) == [path]
