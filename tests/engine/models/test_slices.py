"""Ranks read exactly the parts of weights that they hold.

Each target of a model is cut along a random dimension at random positions, and each part is loaded separately.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from stoker_common.errors import WeightsError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.build import Build
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.decoder_loader import DecoderLoader
from stoker_engine.models.gguf import gguf_tensor
from stoker_engine.models.gguf.gguf_file import GGUFFile
from stoker_engine.models.loading.safetensors_folder import SafetensorsFolder
from stoker_engine.models.loading.weights import load_weights
from stoker_engine.parallel.communicator import SingleRank
from stoker_engine.quant.weight_target import Shard, WeightTarget
from stoker_engine.sizing.pipeline_stages import Stage

from ...support.engine.tiny_models import tiny_gguf
from . import llama_cpp


@dataclass
class _Targets:
    """A model that consists of weight targets."""

    config: ModelConfig
    named: dict[str, WeightTarget]

    def weight_targets(self) -> dict[str, WeightTarget]:
        return self.named


@dataclass
class _Counted:
    """A safetensors file that counts the bytes read from it."""

    file: Any
    read: list[int] = field(default_factory=list)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(self.file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        theirs = self.file.get_slice(name)
        counted = self

        class Slice:
            get_shape = theirs.get_shape

            def __getitem__(self, part: Any) -> torch.Tensor:
                return counted._count(theirs[part])

        return Slice()

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.read.append(tensor.nbytes)
        return tensor


def _cut(tensor: torch.Tensor, dim: int, start: int, size: int) -> WeightTarget:
    """Return a target for the part of a weight from `start` along `dim`, where the whole has `size`."""
    shares = [Shard.whole(length) for length in tensor.shape]
    shares[dim] = Shard(start, tensor.shape[dim], size)
    return WeightTarget.of(tensor, *shares)


def _cuts(size: int, ranks: int, rng: random.Random) -> list[int]:
    return [0, *sorted(rng.randrange(size + 1) for _ in range(ranks - 1)), size]


def _parts(whole: dict[str, WeightTarget], ranks: int, rng: random.Random) -> list[dict[str, WeightTarget]]:
    """Return each rank's targets. Some stay whole, as do gates over shared experts, which are vectors in GGUF."""
    shares: list[dict[str, WeightTarget]] = [{} for _ in range(ranks)]
    for name, target in whole.items():
        shape = target.full_shape
        dim = None if "shared_gate" in name else rng.choice([None, 0, len(shape) - 1])
        for share, start, stop in zip(shares, (cuts := _cuts(shape[dim or 0], ranks, rng)), cuts[1:], strict=False):
            if dim is None:
                share[name] = WeightTarget.whole(torch.empty(shape))
            else:
                own = [*shape[:dim], stop - start, *shape[dim + 1 :]]
                share[name] = _cut(torch.empty(own), dim, start, shape[dim])
    return shares


def _assert_same_parts(whole: dict[str, WeightTarget], shares: list[dict[str, WeightTarget]]) -> None:
    for name, target in whole.items():
        for share in shares:
            assert torch.equal(share[name].tensor, share[name].part_of(target.tensor)), name


def _loaded(config: ModelConfig, load: Callable[[Any], None]) -> dict[str, WeightTarget]:
    with torch.inference_mode():
        model = Decoder(config, Build(torch.float32, SdpaBackend(), REFERENCE), max_model_len=128)
        load(model)
        return {name: WeightTarget.whole(target.tensor.contiguous()) for name, target in model.weight_targets().items()}


@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [
        ("llama", 1, 2),
        ("llama biases", 2, 2),
        ("bloom", 2, 2),
        ("mixtral", 2, 2),
        ("deepseek_v3", 1, 2),
        ("gemma3", 1, 3),
    ],
)
def test_stages_read_only_their_layers(name: str, ranks: int, stages: int, tmp_path: Path) -> None:
    """A stage also reads the embedding or head that it holds; a tied head on another stage is also read there."""
    tiny_gguf(name).save_pretrained(tmp_path)
    config = ModelConfig.from_dict(read_config(tmp_path))
    names = FAMILIES[config.architecture].weight_names
    whole = _loaded(config, lambda model: load_weights(model, SafetensorsFolder(tmp_path), names))
    cpu, found = torch.device("cpu"), set[str]()
    for rank, stage in product(range(ranks), range(stages)):
        source = SafetensorsFolder(tmp_path)
        counted = _Counted(source.tensors._files[0])
        source.tensors._file_of = dict.fromkeys(source.tensors._file_of, counted)
        silent_rank = _SilentRank(rank, ranks)
        build = Build(torch.float32, SdpaBackend(), REFERENCE, silent_rank, stage=Stage(stage, stages))
        targets = DecoderLoader(names, source).load(config, build, cpu, 128, lambda done, total: None).weight_targets()
        assert sum(counted.read) == sum(target.tensor.nbytes for target in targets.values())
        for param_name, target in targets.items():
            assert torch.equal(target.tensor, target.part_of(whole[param_name].tensor)), param_name
        found |= targets.keys()
    assert found == whole.keys()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "name", ["bloom", "cohere plus", "deepseek_v3", "falcon 40b", "gpt_neox", "llama", "mixtral", "phi3", "qwen2_moe"]
)
def test_ranks_read_only_their_parts_of_safetensors(name: str, ranks: int, tmp_path: Path) -> None:
    tiny_gguf(name).save_pretrained(tmp_path)
    config = ModelConfig.from_dict(read_config(tmp_path))
    names = FAMILIES[config.architecture].weight_names
    whole = _loaded(config, lambda model: load_weights(model, SafetensorsFolder(tmp_path), names))
    shares = _parts(whole, ranks, random.Random(f"{name} {ranks}"))
    for share in shares:
        source = SafetensorsFolder(tmp_path)
        counted = _Counted(source.tensors._files[0])
        source.tensors._file_of = dict.fromkeys(source.tensors._file_of, counted)
        load_weights(_Targets(config, share), source, names)
        assert sum(counted.read) == sum(target.tensor.nbytes for target in share.values())
    _assert_same_parts(whole, shares)


@dataclass
class _SilentRank(SingleRank):
    """A rank that never communicates."""

    rank: int
    size: int


@pytest.mark.parametrize(
    ("name", "ranks"), [("dbrx", 2), ("dbrx", 4), ("deepseek_v3", 4), ("gpt_oss", 2), ("mixtral", 4), ("qwen2_moe", 2)]
)
def test_ranks_read_only_their_experts(name: str, ranks: int, tmp_path: Path) -> None:
    """Experts are whole; all of a layer's may be in one tensor, transposed or not."""
    tiny_gguf(name).save_pretrained(tmp_path)
    config = ModelConfig.from_dict(read_config(tmp_path))
    names = FAMILIES[config.architecture].weight_names
    whole = _loaded(config, lambda model: load_weights(model, SafetensorsFolder(tmp_path), names))
    for rank in range(ranks):
        source = SafetensorsFolder(tmp_path)
        counted = _Counted(source.tensors._files[0])
        source.tensors._file_of = dict.fromkeys(source.tensors._file_of, counted)
        build = Build(torch.float32, SdpaBackend(), REFERENCE, _SilentRank(rank, ranks), whole_experts=True)
        with torch.inference_mode():
            model = Decoder(config, build, max_model_len=128)
            load_weights(model, source, names)
        targets = model.weight_targets()
        assert sum(counted.read) == sum(target.tensor.nbytes for target in targets.values())
        for param_name, target in targets.items():
            assert torch.equal(target.tensor, target.part_of(whole[param_name].tensor)), param_name


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "name",
    ["bloom", "cohere plus", "dbrx", "deepseek_v3", "falcon 40b", "gpt2", "llama", "mixtral", "phi3", "qwen2_moe"],
)
def test_ranks_read_only_their_parts_of_gguf(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama_cpp.write(tiny_gguf(name), tmp_path / "model.gguf")
    file = GGUFFile(path)
    config = file.config()
    whole = _loaded(config, lambda model: load_weights(model, file, file.weight_names()))
    shares = _parts(whole, ranks, random.Random(f"{name} {ranks}"))
    read = list[int]()

    def counted(descriptor: int, buffers: list[memoryview], start: int) -> int:
        read.append(os.preadv(descriptor, buffers, start))
        return read[-1]

    monkeypatch.setattr(gguf_tensor, "preadv", counted)
    for share in shares:
        read.clear()
        load_weights(_Targets(config, share), file, file.weight_names())
        assert sum(read) == sum(target.tensor.nbytes for target in share.values())
    _assert_same_parts(whole, shares)


@pytest.mark.parametrize("name", ["gpt2", "dbrx"])
def test_parts_of_transposed_tensors_are_right(name: str, tmp_path: Path) -> None:
    """Each rank reads these tensors whole."""
    tiny_gguf(name).save_pretrained(tmp_path)
    config = ModelConfig.from_dict(read_config(tmp_path))
    names, source = FAMILIES[config.architecture].weight_names, SafetensorsFolder(tmp_path)
    whole = _loaded(config, lambda model: load_weights(model, source, names))
    shares = _parts(whole, 3, random.Random(name))
    for share in shares:
        load_weights(_Targets(config, share), source, names)
    _assert_same_parts(whole, shares)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K])
@pytest.mark.parametrize("shape", [(512,), (7, 256), (3, 5, 512)])
def test_parts_of_quantized_tensors_read_only_their_blocks(
    shape: tuple[int, ...], kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tensor, "_PIECE", 1024)
    rng = random.Random(f"{shape} {kind}")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).numpy()
    packed = quantize(values, kind) if kind != GGMLQuantizationType.Q4_K else _random_blocks(shape, rng)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("t", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "model.gguf")
    expected = torch.from_numpy(dequantize(packed, kind)).float().view(shape)
    read = list[int]()

    def counted(descriptor: int, buffers: list[memoryview], start: int) -> int:
        read.append(os.preadv(descriptor, buffers, start))
        return read[-1]

    monkeypatch.setattr(gguf_tensor, "preadv", counted)
    for _ in range(30):
        part = tuple(slice(*sorted(rng.choices(range(size + 1), k=2))) for size in shape)
        read.clear()
        assert torch.equal(file.read("t", part), expected[part])
        columns = part[-1]
        rows = expected[part].numel() // max(columns.stop - columns.start, 1)
        blocks = -(-columns.stop // block) - columns.start // block if columns.stop > columns.start else 0
        assert sum(read) == rows * blocks * block_bytes


def _random_blocks(shape: tuple[int, ...], rng: random.Random) -> Any:
    """Return Q4_K blocks, which the library cannot write: small scales, and random codes."""
    import numpy as np

    blocks = np.frombuffer(rng.randbytes(np.prod(shape) // 256 * 144), dtype=np.uint8).reshape(-1, 144).copy()
    blocks[:, :4] = np.array([0.01, 0.02], dtype=np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def test_tensors_of_another_shape_are_refused_by_every_rank(tmp_path: Path) -> None:
    tiny_gguf("phi3").save_pretrained(tmp_path)
    config = ModelConfig.from_dict(read_config(tmp_path))
    names, source = FAMILIES[config.architecture].weight_names, SafetensorsFolder(tmp_path)
    whole = _loaded(config, lambda model: load_weights(model, source, names))
    for param_name, message in (
        ("layers.0.k.weight", r"qkv_proj\.weight: a fused tensor has"),
        ("layers.1.o.weight", r"o_proj\.weight has shape"),
    ):
        for share in _parts(whole, 2, random.Random(0)):
            rows = whole[param_name].full_shape[0]
            share[param_name] = _cut(torch.empty(1, whole[param_name].full_shape[1]), 0, 0, rows + 1)
            with pytest.raises(WeightsError, match=message):
                load_weights(_Targets(config, share), source, names)
