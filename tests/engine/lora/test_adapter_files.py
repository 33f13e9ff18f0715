"""Cached facts about adapters' files: hashes of unchanged files, and layouts, which do not depend on elements."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker_common.errors import AdapterError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.lora import adapter_files
from stoker_engine.lora.adapter_files import AdapterFolders
from stoker_engine.lora.adapter_reader import AdapterReader, adapter_reader
from stoker_engine.lora.pace import Pace
from stoker_engine.models.checkpoint import find_checkpoint

from ...support.engine.peft_adapters import PeftAdapters
from ...support.engine.tiny_models import save_model, tiny_family

TENSORS = "adapter_model.safetensors"


def folder_of(path: Path, config: bytes, tensors: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_bytes(config)
    (path / TENSORS).write_bytes(tensors)
    return path


@pytest.fixture
def settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "_SETTLED_S", -3600)


@pytest.mark.usefixtures("settled_at_once")
def test_files_are_hashed_again_only_after_a_change(tmp_path: Path) -> None:
    folders, folder = AdapterFolders(1 << 20), folder_of(tmp_path / "a", b"{}", b"x" * 3000)
    first = folders.read(folder, Pace())
    assert not first.is_known
    again = folders.read(folder, Pace())
    assert again.is_known and again.digest == first.digest
    assert torch.equal(again.tensors, first.tensors)

    times = (folder / TENSORS).stat()
    with (folder / TENSORS).open("r+b") as file:  # in place, of the same size, with the old time of modification
        file.write(b"y")
    os.utime(folder / TENSORS, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = folders.read(folder, Pace())
    assert not changed.is_known and changed.digest != first.digest

    (folder / "new").write_bytes(b"x" * 3000)
    (folder / "new").rename(folder / TENSORS)  # another file of the first one's content
    replaced = folders.read(folder, Pace())
    assert not replaced.is_known and replaced.digest == first.digest

    (folder / "adapter_config.json").write_bytes(b"[]")
    assert folders.read(folder, Pace()).digest not in (first.digest, changed.digest)


def test_new_files_are_hashed_each_time(tmp_path: Path) -> None:
    folders, folder = AdapterFolders(1 << 20), folder_of(tmp_path / "a", b"{}", b"x" * 10)
    assert not folders.read(folder, Pace()).is_known
    assert not folders.read(folder, Pace()).is_known


@pytest.mark.usefixtures("settled_at_once")
def test_few_hashes_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "_MAX_REMEMBERED", 2)
    folders = AdapterFolders(1 << 20)
    a, b, c = (folder_of(tmp_path / name, b"{}", name.encode()) for name in "abc")
    for folder in (a, b, a, c):
        folders.read(folder, Pace())
    assert [folders.read(folder, Pace()).is_known for folder in (a, c, b)] == [True, True, False]


def test_file_truncated_during_the_read_gives_only_the_read_bytes(tmp_path: Path) -> None:
    """If the file is truncated meanwhile, no uninitialized memory follows what was read."""
    folder = folder_of(tmp_path / "a", b"{}", b"x" * (3 << 20))

    class Truncating(Pace):
        num_pauses = 0

        def give_way(self) -> None:
            self.num_pauses += 1
            if self.num_pauses == 3:  # the config, and two of three chunks
                os.truncate(folder / TENSORS, 100)

    read = AdapterFolders(1 << 30).read(folder, Truncating())
    assert len(read.tensors) == 2 << 20 and bool((read.tensors == ord("x")).all())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model", tiny_family("llama"))


def reader_of(base: Path, dtype: torch.dtype = torch.float32) -> AdapterReader:
    args = EngineArgs(model=str(base), enable_lora=True, max_lora_rank=16)
    return adapter_reader(find_checkpoint(args), args, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", [4, 6])
def test_adapters_of_one_layout_keep_their_own_elements(
    alpha: int, stored: torch.dtype, dtype: torch.dtype, base: Path, tmp_path: Path
) -> None:
    """A reader that knows the layout reads the same as a new one, and refuses elements that are not finite."""
    adapters, reader = PeftAdapters(tiny_family("llama")), reader_of(base, dtype)
    folders = []
    for seed in range(3):
        torch.manual_seed(seed)
        folder = adapters.save_adapter(tmp_path / f"{seed}", r=4, lora_alpha=alpha)
        tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / TENSORS).items()}
        for tensor in tensors.values():
            tensor.add_(seed)
        save_file(tensors, folder / TENSORS)
        folders.append(folder)
    for folder in folders:
        found, expected = reader.read(folder), reader_of(base, dtype).read(folder)
        assert found.digest == expected.digest and found.factors.keys() == expected.factors.keys()
        for name, factors in expected.factors.items():
            assert torch.equal(found.factors[name].a, factors.a) and torch.equal(found.factors[name].b, factors.b)
        in_file = load_file(folder / TENSORS)
        prefix = "base_model.model.model.layers.1.mlp.up_proj"
        scaled = (in_file[f"{prefix}.lora_B.weight"].float() * (alpha / 4)).to(dtype)
        [up] = [each for name, each in found.factors.items() if "1" in name and "up" in name]
        assert torch.equal(up.b, scaled)
        assert torch.equal(up.a, in_file[f"{prefix}.lora_A.weight"].to(dtype))
    for value in (float("nan"), float("inf"), -float("inf")):
        damaged = dict(tensors)
        name = sorted(damaged)[len(damaged) // 2]
        damaged[name] = damaged[name].clone()
        damaged[name].view(-1)[-1] = value
        save_file(damaged, folders[0] / TENSORS)
        with pytest.raises(AdapterError, match="nan or infinity"):
            reader.read(folders[0])


def test_large_elements_whose_sum_is_infinite_are_read(base: Path, tmp_path: Path) -> None:
    folder = PeftAdapters(tiny_family("llama")).save_adapter(tmp_path / "a", r=4, lora_alpha=4)
    tensors = {name: torch.full_like(tensor, 3e38) for name, tensor in load_file(folder / TENSORS).items()}
    save_file(tensors, folder / TENSORS)
    factors = reader_of(base).read(folder).factors
    assert all(bool((each.a == 3e38).all()) for each in factors.values())


def test_adapters_with_equal_tensors_follow_their_own_config(base: Path, tmp_path: Path) -> None:
    """Equal tensors beside another config are scaled, or refused, as that config says."""
    folder, reader = PeftAdapters(tiny_family("llama")).save_adapter(tmp_path / "a", r=4, lora_alpha=4), reader_of(base)
    plain, path = reader.read(folder).factors, folder / "adapter_config.json"
    config = json.loads(path.read_bytes())
    path.write_text(json.dumps(config | {"lora_alpha": 8}))
    for name, each in reader.read(folder).factors.items():
        torch.testing.assert_close(each.b, 2 * plain[name].b)
    path.write_text(json.dumps(config | {"r": 5}))
    with pytest.raises(AdapterError, match="not rank 5"):
        reader.read(folder)


def test_unaligned_tensors_are_read(base: Path, tmp_path: Path) -> None:
    folder = PeftAdapters(tiny_family("llama")).save_adapter(tmp_path / "a", r=4, lora_alpha=4)
    plain, content = reader_of(base).read(folder).factors, (folder / TENSORS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    for padding in (1, 2, 3, 5):
        header = content[8 : 8 + size] + b" " * padding
        (folder / TENSORS).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
        for name, each in reader_of(base).read(folder).factors.items():
            assert torch.equal(each.a, plain[name].a) and torch.equal(each.b, plain[name].b)
