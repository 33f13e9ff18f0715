"""A model's files are untrusted or damaged: each either loads, or is refused with a message.

No other exception is raised, reading ends, and no memory is allocated for a damaged count.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.gguf.gguf_file import GGUFFile
from stoker_engine.tokens.tokenizer import Tokenizer

Change = Callable[..., Path]


@pytest.fixture
def changed(tiny_llama: Path, tmp_path: Path) -> Change:
    """Return a copy of a tiny model whose `file` contains other bytes, or other JSON fields."""

    def change(file: str, content: bytes | None = None, **fields: Any) -> Path:
        folder = tmp_path / str(random.getrandbits(64))
        shutil.copytree(tiny_llama, folder)
        if content is None:
            path = folder / file
            content = json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **fields}).encode()
        (folder / file).write_bytes(content)
        return folder

    return change


def _load(folder: Path) -> bool:
    """Return whether the model and its tokenizer load."""
    args = EngineArgs(str(folder), num_gpu_blocks_override=8, max_num_batched_tokens=64, max_num_seqs=4)
    try:
        Engine.from_args(args)
        Tokenizer.load(folder)
    except (ArgumentError, ModelError) as error:
        assert len(str(error)) < 5000, "the message is too long"
        return False
    return True


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_hidden_layers", [-1, 0, 1, 3, 10**9]),
        ("num_attention_heads", [0, 1, 3, 64, 65, 10**6]),
        ("num_key_value_heads", [0, 1, 3, -2]),
        ("hidden_size", [0, 1, 63, 10**9]),
        ("intermediate_size", [1, 10**9]),
        ("head_dim", [1, 15, 16, 10**9]),
        ("vocab_size", [1, 511, 513, 10**9]),
        ("max_position_embeddings", [1, 2, 2**31 - 1]),
        ("eos_token_id", ["x", [[]], 10**12, {}]),
        ("hidden_act", ["x", 5, "softmax"]),
        ("rope_theta", [0, -5, "x", 1e300]),
        ("rope_parameters", [{"rope_type": "yarn", "factor": 1e30}, {"rope_type": "llama3"}, [1], {"rope_theta": 2}]),
        ("dtype", ["int8", "x", 5, [], "float64"]),
        ("rms_norm_eps", [-1, 0, 1e30]),
        ("architectures", ["LlamaForCausalLM", [5], [[]], {}, ["x"]]),
    ],
)
def test_odd_config_fields_load_or_are_refused(changed: Change, field: str, values: list[Any]) -> None:
    for value in values:
        _load(changed("config.json", **{field: value}))


@pytest.mark.parametrize(
    ("file", "field", "values"),
    [
        ("generation_config.json", "temperature", ["hot", -1, 1e400, [], True]),
        ("generation_config.json", "top_k", [1.5, "x", -7]),
        ("generation_config.json", "max_new_tokens", [0, -1, "x", 10**30]),
        ("generation_config.json", "eos_token_id", ["x", [None], {}]),
        ("tokenizer_config.json", "added_tokens_decoder", [5, [], {"x": {}}, {"1": 5}, {"1": {"content": 5}}]),
        ("tokenizer_config.json", "eos_token", [5, [], {}, {"content": []}]),
        ("tokenizer_config.json", "extra_special_tokens", [5, [5], [{}], "x"]),
        ("tokenizer_config.json", "chat_template", [5, [5], [{}], [{"name": [], "template": 5}], {"a": 1}]),
        ("special_tokens_map.json", "bos_token", [5, {"content": {}}]),
        ("tokenizer.json", "model", [5, {}, {"type": "BPE", "vocab": {}, "merges": []}, None]),
        ("tokenizer.json", "decoder", [5, {"type": "x"}]),
    ],
)
def test_odd_fields_of_other_json_files_load_or_are_refused(
    changed: Change, file: str, field: str, values: list[Any]
) -> None:
    for value in values:
        _load(changed(file, **{field: value}))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"null", b'{"a": ' * 50_000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_malformed_json_files_are_refused(changed: Change, file: str, content: bytes) -> None:
    assert not _load(changed(file, content))


@pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates.jinja"])
def test_binary_chat_template_is_refused(changed: Change, file: str, tmp_path: Path) -> None:
    if file == "chat_template.jinja":
        assert not _load(changed(file, b"\xff\xfe{{ messages }}"))
    (tmp_path / file).write_bytes(b"\x89PNG\xff")
    for argument in (str(tmp_path / file), "a\0b"):
        with pytest.raises(ArgumentError, match="--chat-template"):
            Tokenizer.load(tmp_path, argument)


def _header(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        _header(b""),
        _header(b"{}"),
        _header(b"{}", 2**63),
        _header(b"{}", 99_999_999),
        _header(b"[" * 100_000),
        _header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999]}}'),
        _header(b'{"a": {"dtype": "F32", "shape": [18446744073709551615, 2], "data_offsets": [0, 4]}}') + b"\0" * 4,
        _header(b'{"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}') + b"\0" * 4,
        _header(b'{"a": 5}'),
        _header(b"\xff\xff"),
    ],
)
def test_malformed_safetensors_headers_are_refused(changed: Change, content: bytes) -> None:
    assert not _load(changed("model.safetensors", content))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float64, torch.complex64])
def test_tensors_of_odd_dtypes_load_or_are_refused(
    changed: Change, tiny_llama: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(tiny_llama / "model.safetensors").items()}
    save_file(tensors, tmp_path / "x.safetensors")
    _load(changed("model.safetensors", (tmp_path / "x.safetensors").read_bytes()))


@pytest.mark.parametrize(
    "index",
    [
        {},
        {"weight_map": 5},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": []}},
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "missing.safetensors"}},
        {"weight_map": {"a": "config.json"}},
        {"weight_map": {"a": ""}},
        {"weight_map": {"a": "a\0b"}},
        {"weight_map": {"a": "a" * 5000}},
        {"weight_map": {}},
    ],
)
def test_malformed_indexes_are_refused(changed: Change, index: dict[str, Any]) -> None:
    assert not _load(changed("model.safetensors.index.json", json.dumps(index).encode()))


def _gguf(path: Path, **fields: Any) -> bytes:
    """Return a small GGUF file with all of a Llama's metadata."""
    writer = GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "embedding_length": 32, "attention.head_count": 2, "context_length": 64}
    for key, value in {**sizes, "feed_forward_length": 32, **fields}.items():
        match value:
            case str():
                writer.add_string(f"llama.{key}", value)
            case list():
                writer.add_array(f"llama.{key}", value)
            case int() if value < 0:
                writer.add_int64(f"llama.{key}", value)
            case int():
                writer.add_uint64(f"llama.{key}", value)
            case _:
                writer.add_float32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(64)])
    writer.add_token_scores([0.0] * 64)
    writer.add_tensor("token_embd.weight", torch.zeros(64, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _read_gguf(path: Path) -> bool:
    """Return whether its config and tokenizer can be read."""
    ends = []
    for read in (lambda: find_checkpoint(EngineArgs(str(path))), lambda: Tokenizer.load(path)):
        try:
            read()
            ends.append(True)
        except ModelError as error:
            assert len(str(error)) < 5000, "the message is too long"
            ends.append(False)
    return all(ends)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
def test_damaged_gguf_files_load_or_are_refused(tmp_path: Path) -> None:
    """Files are truncated anywhere, or have changed bytes in the metadata."""
    path = tmp_path / "model.gguf"
    whole = _gguf(path)
    assert _read_gguf(path)
    metadata = whole.index(b"token_embd.weight") + 60
    rng = random.Random(0)
    for _ in range(150):
        path.write_bytes(whole[: rng.randrange(metadata)])
        assert not _read_gguf(path)
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(metadata)] = rng.choice([0, 1, 8, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(damaged)
        _read_gguf(path)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "fields",
    [
        {"block_count": 10**9},
        {"block_count": -1},
        {"block_count": "x"},
        {"embedding_length": [1, 2]},
        {"attention.head_count": 2**40},
        {"attention.head_count": "x"},
        {"context_length": 0},
        {"rope.dimension_count": "x"},
        {"rope.dimension_count": 1000},
        {"rope.scaling.type": "linear"},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": "x"},
        {"attention.key_length": 0.5},
        {"expert_count": 10**6},
    ],
)
def test_absurd_gguf_metadata_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    _gguf(path, **fields)
    with pytest.raises(ModelError):
        GGUFFile(path).config()


def _metadata(value: bytes, count: int = 1, tensors: int = 0) -> bytes:
    """Return a GGUF file with one key; `value` is its type and the following bytes."""
    key = b"general.name"
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + struct.pack("<Q", len(key)) + key + value


_ARRAY, _STRING, _U32 = 9, 8, 4


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "content",
    [
        _metadata(struct.pack("<I", _ARRAY) + struct.pack("<IQ", _ARRAY, 1) * 20_000 + struct.pack("<IQ", _U32, 0)),
        _metadata(struct.pack("<IIQ", _ARRAY, _STRING, 2**60)),
        _metadata(struct.pack("<IIQ", _ARRAY, _U32, 2**62)),
        _metadata(struct.pack("<IIQ", _ARRAY, _U32, 4000)),
        _metadata(struct.pack("<IIQ", _ARRAY, _ARRAY, 2**60)),
        _metadata(struct.pack("<IQ", _STRING, 2**63)),
        _metadata(struct.pack("<IQ", _STRING, 2**64 - 1)),
        _metadata(struct.pack("<I", 99)),
        _metadata(struct.pack("<IQ", _STRING, 0), count=2**63),
        _metadata(struct.pack("<IQ", _STRING, 0), tensors=2**63),
        b"GGUF",
        b"GGUF" + b"\xff" * 100,
        b"",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        _metadata(struct.pack("<IQ", _STRING, 0), count=200_000) + bytes(200_000 * 12),
    ],
)
def test_malformed_gguf_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert not _read_gguf(path)
    with pytest.raises(ModelError):
        Tokenizer.load(path)
