"""An adapter's files, compared with PEFT's merged model; files that do not fit the model give a one-line error."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from stoker_common.errors import AdapterError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.lora.adapter_reader import AdapterReader, adapter_reader
from stoker_engine.models.checkpoint import find_checkpoint

from ...support.engine.tiny_configs import VOCABULARY
from ...support.engine.tiny_models import save_model, tiny_family, tiny_mixture
from ..models import llama_cpp

_PREFIX = "base_model.model.model.layers"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model", tiny_family("llama"))


def reader_of(base: Path, **options: Any) -> AdapterReader:
    args = EngineArgs(model=str(base), enable_lora=True, **{"max_lora_rank": 16, **options})
    return adapter_reader(find_checkpoint(args), args, torch.float32)


@pytest.fixture(scope="module")
def reader(base: Path) -> AdapterReader:
    return reader_of(base)


def save(folder: Path, dtype: torch.dtype | None = None, **fields: Any) -> tuple[Path, Tensors]:
    """Save a PEFT adapter; return its folder, and the difference of its merged model from the base."""
    model = tiny_family("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(5)
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": ["q_proj"], **fields})
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(str(folder))
    if dtype is not None:
        path = folder / "adapter_model.safetensors"
        save_file({key: value.to(dtype) for key, value in load_file(path).items()}, path)
    merged = adapted.merge_and_unload().state_dict()
    return folder, {key: merged[key] - before[key] for key in before if not torch.equal(merged[key], before[key])}


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 1},
        {"r": 7, "use_rslora": True},
        {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 3}, "alpha_pattern": {r".*0.*q_proj": 9}},
        {"target_modules": r".*layers\.1\..*(q|down)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.0\..*v_proj"},
        {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": 1},
        {"target_modules": ["gate_proj"], "layers_to_transform": [0], "layers_pattern": ["layers"]},
        {"target_parameters": ["q_proj.weight"], "target_modules": []},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_factors_equal_the_difference_of_pefts_merged_model(
    fields: dict[str, Any], tmp_path: Path, reader: AdapterReader
) -> None:
    folder, differences = save(tmp_path, **fields)
    factors = reader.read(folder).factors
    assert len(factors) == len(differences)
    theirs = sorted(float(each.norm()) for each in differences.values())
    assert sorted(float((each.b @ each.a).norm()) for each in factors.values()) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_adapters_are_read(dtype: torch.dtype, tmp_path: Path, reader: AdapterReader) -> None:
    assert len(reader.read(save(tmp_path, dtype)[0]).factors) > 1


def test_gguf_base_accepts_the_same_adapter(tmp_path: Path, base: Path, reader: AdapterReader) -> None:
    path = llama_cpp.write(tiny_family("llama"), tmp_path / "model.gguf")
    folder, _ = save(tmp_path / "adapter", target_modules="all-linear")
    expected, found = reader.read(folder), reader_of(path).read(folder)
    assert found.digest == expected.digest
    assert found.factors.keys() == expected.factors.keys()
    for name, factors in expected.factors.items():
        assert torch.equal(found.factors[name].a, factors.a)
        assert torch.equal(found.factors[name].b, factors.b)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("adapter"), target_modules=["q_proj", "down_proj"])[0]


@pytest.fixture
def files(tmp_path: Path, whole: Path) -> Path:
    """A separate folder with an adapter."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    return tmp_path


def refusal(reader: AdapterReader, folder: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        reader.read(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 900
    return message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("how", ["missing", "fifo", "directory", "dangling", "empty", "garbage", "half"])
def test_unreadable_files_are_refused(name: str, how: str, files: Path, reader: AdapterReader) -> None:
    path = files / name
    content = path.read_bytes()
    path.unlink()
    if how == "fifo":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    elif how == "dangling":
        path.symlink_to("nowhere")
    elif how != "missing":
        path.write_bytes({"empty": b"", "garbage": b"\xff" * 300, "half": content[: len(content) // 2]}[how])
    assert name in refusal(reader, files)


def test_pickled_matrices_are_not_read(files: Path, reader: AdapterReader) -> None:
    (files / "adapter_model.safetensors").rename(files / "adapter_model.bin")
    assert "safe_serialization" in refusal(reader, files)


@pytest.mark.parametrize("path", ["/no/such\0folder", "/no/\ud800", "/dev/null", "/" + "x" * 5000])
def test_invalid_paths_are_refused(path: str, reader: AdapterReader) -> None:
    with pytest.raises(AdapterError):
        reader.read(Path(path))


def test_large_config_is_refused(files: Path, reader: AdapterReader) -> None:
    with (files / "adapter_config.json").open("ab") as file:
        file.write(b" " * (1 << 20))
    assert "bytes" in refusal(reader, files)


_A, _B = (f"{_PREFIX}.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        tensors[name] = change(tensors.get(name, torch.ones(4, 4))).contiguous()

    return changed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set(_A, lambda x: x.to(torch.int32)), "q_proj"),
        (_set(_A, lambda x: x.to(torch.float8_e4m3fn)), "q_proj"),
        (_set(_A, lambda x: x * float("nan")), "nan or infinity"),
        (_set(_B, lambda x: x.double() * 1e300), "nan or infinity"),
        (_set(_A, lambda x: x[:, 1:]), "another model"),
        (_set(_B, lambda x: x[1:]), "another model"),
        (_set(_A, lambda x: x[1:]), "rank 4"),
        (_set(_A, lambda x: x[0, 0]), "rank 4"),
        (_set(_A, lambda x: x[None]), "rank 4"),
        (_set(_A, lambda x: x[:0]), "rank 4"),
        (lambda tensors: tensors.pop(_A), "only one of the two"),
        (lambda tensors: (tensors.pop(_A), tensors.pop(_B)), "lacks"),
        (lambda tensors: tensors.clear(), "no matrices"),
        (_set(f"{_PREFIX}.0.self_attn.q_proj.lora_magnitude_vector", lambda x: x), "DoRA"),
        (_set(f"{_PREFIX}.0.self_attn.q_proj.lora_B.bias", lambda x: x), "bias"),
        (_set("base_model.model.lm_head.weight", lambda x: x), "merge"),
        (_set("base_model.model.model.embed_tokens.base_layer.weight", lambda x: x), "tokens were added"),
        (_set(f"{_PREFIX}.0.self_attn.q_proj.base_layer.weight", lambda x: x), "merge"),
        (_set(f"{_PREFIX}.0.self_attn.q_proj.base_layer.weight", lambda x: torch.ones(VOCABULARY, 4)), "merge"),
        (_set("anything", lambda x: x), "anything"),
        (_set("any\nthing" * 1000, lambda x: x), "no name"),
        (_set(f"{_PREFIX}.{'9' * 400}.self_attn.q_proj.lora_A.weight", lambda x: x), "q_proj"),
    ],
)
def test_unsuitable_tensors_are_refused(
    change: Callable[[Tensors], object], expected: str, files: Path, reader: AdapterReader
) -> None:
    tensors = load_file(files / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, files / "adapter_model.safetensors")
    assert expected in refusal(reader, files)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"target_modules": ["q_proj", "down_proj", "nothing"]}, "nothing"),
        ({"target_modules": ["q_proj"]}, "does not name"),
        ({"exclude_modules": ["q_proj"]}, "does not name"),
        ({"r": 10**9}, "--max-lora-rank"),
        ({"lora_alpha": 1e308}, "nan or infinity"),
        ({"rank_pattern": {"q_proj": 3}}, "rank 3"),
    ],
)
def test_unsuitable_configs_are_refused(
    fields: dict[str, Any], expected: str, files: Path, reader: AdapterReader
) -> None:
    path = files / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    assert expected in refusal(reader, files)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_all_linear_excludes_embedding_and_head(module: str, tmp_path: Path, reader: AdapterReader) -> None:
    folder, _ = save(tmp_path, target_modules=[module.removeprefix("model."), "q_proj"])
    reader.read(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": "all-linear"}))
    assert f"matrices of {module}, which adapter_config.json does not name" in refusal(reader, folder)


def test_saved_embeddings_fit_the_size_limit(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_engine.lora.adapter_reader._MAX_HEADER_BYTES", 4096)
    folder, _ = save(tmp_path, r=1, target_modules=["embed_tokens", "lm_head"])
    saved = load_file(folder / "adapter_model.safetensors")
    assert {name for name in saved if "base_layer" in name} == {
        f"base_model.model.{module}.base_layer.weight" for module in ("lm_head", "model.embed_tokens")
    }
    assert len(reader_of(base, max_lora_rank=1).read(folder).factors) == 2


def test_flags_limit_ranks_and_modules(base: Path, whole: Path) -> None:
    assert "--max-lora-rank 4" in refusal(reader_of(base, max_lora_rank=1), whole)
    assert "--lora-target-modules" in refusal(reader_of(base, lora_target_modules=("q_proj",)), whole)
    reader_of(base, lora_target_modules=("q_proj", "down_proj")).read(whole)


def test_mutated_files_are_read_or_refused(files: Path, reader: AdapterReader) -> None:
    rng, path = random.Random(2), files / "adapter_model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for index in range(1500):
        mutated = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(header if index % 4 else len(content))] = rng.randrange(256)
        path.write_bytes(mutated[: rng.choice([len(mutated)] * 9 + [rng.randrange(len(mutated))])])
        try:
            reader.read(files)
        except AdapterError as error:
            assert len(str(error)) < 1200


def test_experts_may_be_single_or_stacked(tmp_path: Path) -> None:
    """PEFT wrote single experts with transformers 4; here one of two stacked parameters has an adapter."""
    model = tiny_mixture("qwen3_moe")
    reader = reader_of(save_model(tmp_path / "model", model))
    stacked = get_peft_model(
        model, LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"], init_lora_weights=False)
    )
    stacked.save_pretrained(str(tmp_path / "stacked"))
    names = reader.read(tmp_path / "stacked").factors
    assert names
    assert all("down" in name for name in names)
    config = model.config
    folder, prefix = tmp_path / "single", f"{_PREFIX}.2.mlp.experts.3.gate_proj.lora_"
    folder.mkdir()
    fields = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": r".*layers\.2\.mlp\.experts\.3\.gate_proj",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    a, b = torch.randn(2, config.hidden_size), torch.randn(config.moe_intermediate_size, 2)
    save_file({f"{prefix}A.weight": a, f"{prefix}B.weight": b}, folder / "adapter_model.safetensors")
    (factors,) = reader.read(folder).factors.values()
    assert torch.equal(factors.a, a)
    assert torch.equal(factors.b, b)
