"""From MODEL to a checkpoint: lookup, metadata, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker_common.errors import ArgumentError, ModelError, WeightsError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.checkpoint import Checkpoint, find_checkpoint
from stoker_engine.models.gguf.gguf_file import GGUFFile
from stoker_engine.models.model_card import card_of_folder, card_of_gguf

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


def _find(path: Path) -> Checkpoint:
    return find_checkpoint(EngineArgs(model=str(path)))


def _folder(path: Path, **config: object) -> Path:
    (path / "config.json").write_text(json.dumps({**_LLAMA, **config}))
    save_file({"x": torch.zeros(1)}, path / "model.safetensors")
    return path


def test_adapter_folder_is_refused_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter.*merge"):
        _find(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*save_pretrained"):
        _find(folder)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        _find(tmp_path)
    with pytest.raises(ModelError, match="neither a local folder"):
        _find(tmp_path / "nowhere" / "else")
    (tmp_path / "manifest.yaml").touch()
    with pytest.raises(ModelError, match=r"not a model; run a manifest with `stoker up -f .*manifest\.yaml`"):
        _find(tmp_path / "manifest.yaml")


@pytest.mark.parametrize("path", ["models/misspelled.gguf", "misspelled/"])
def test_misspelled_path_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"'{path}' is neither a local folder or GGUF file nor a hub id"):
        find_checkpoint(EngineArgs(model=path))


@pytest.mark.parametrize("quantized", [{"quant_method": "aqlm"}, {"quant_method": "spqr"}])
def test_unsupported_quantization_methods_are_refused(quantized: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=quantized["quant_method"]):
        _find(_folder(tmp_path, quantization_config=quantized))


def test_encoder_is_refused_as_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="encoder"):
        _find(_folder(tmp_path, architectures=["BertForMaskedLM"], model_type="bert"))


def test_revision_requires_a_hub_model(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--revision"):
        find_checkpoint(EngineArgs(model=str(_folder(tmp_path)), revision="main"))


@pytest.mark.parametrize(
    ("readme", "licence", "title"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n\n# A Model\n\nText", "apache-2.0", "A Model"),
        (
            "---\nlicense: other\nlicense_name: own-terms\nlicense_link: LICENSE\n---\n# **A** Model",
            "own-terms (LICENSE)",
            "A** Model",
        ),
        ("---\nlicense: [broken\n---\n# A Model", None, "A Model"),
        ("no front matter", None, None),
    ],
)
def test_the_card_names_the_licence(readme: str, licence: str | None, title: str | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(readme)
    card = _find(_folder(tmp_path)).card
    assert card.licence == licence
    assert card.title == (f"{title} ({tmp_path / 'README.md'})" if title else str(tmp_path / "README.md"))


def test_licence_file_is_read_if_there_is_no_card(tmp_path: Path) -> None:
    assert card_of_folder(tmp_path).licence is None
    (tmp_path / "LICENSE").write_text("\n\n   MIT License\n\nCopyright …")
    assert card_of_folder(tmp_path).licence == "MIT License (LICENSE)"


def test_gguf_carries_its_card(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_name("A Model")
    writer.add_license("gemma")
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = card_of_gguf(GGUFFile(tmp_path / "model.gguf").field)
    assert (card.licence, card.title) == ("gemma", "A Model")


def test_dtype_defaults_to_that_of_the_tensors(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in given.items() if name not in ("dtype", "torch_dtype")})
    )
    for file in folder.glob("*.safetensors"):
        save_file({name: each.to(torch.bfloat16) for name, each in load_file(file).items()}, file)
    assert _find(folder).config.dtype == "bfloat16"
