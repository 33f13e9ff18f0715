"""Tokenizers from files, compared with transformers on the same files."""

from __future__ import annotations

import codecs
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.tokens.detokenizer import IncrementalDetokenizer
from stoker_engine.tokens.tokenizer import Tokenizer

ODD = [
    "Hello world, it's 12345 o'clock; don't!",
    "  leading,  double   and trailing  ",
    "emoji 🎉👩‍👩‍👧‍👦🏳️‍🌈 漢字かな交じり文 कॉम्बाइनिंग é e\u0301 ñ",
    "\n\n\ttabs\nand\r\nnewlines\x00\x7f",
    "<0x41><s></s><unk> [INST] <think>x</think> ▁▁ \u200b\ufffd",
    "a" * 300,
    "",
    " ",
    "SELECT * FROM t WHERE x>=10 AND y!='z'; // ŠŽ ΑΩ ﬁ ²³",
]


@pytest.fixture
def folder(tmp_path: Path, byte_level: Backend) -> Path:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}), encoding="utf-8"
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<s>", "eos_token": "</s>"},
        {"bos_token": "<s>", "add_bos_token": True},
        {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>", "add_eos_token": True},
        {"bos_token": "<s>", "add_bos_token": False, "unk_token": None},
        {"bos_token": "<think>", "pad_token": "the"},
        {"eos_token": "<|z|>", "additional_special_tokens": ["<|b|>", "<|a|>"], "bos_token": "<|y|>"},
        {"added_tokens_decoder": {"500": {"content": "[INST]", "special": True}}},
        {"added_tokens_decoder": {"5": {"content": "<think>", "special": True, "lstrip": True}}},
    ],
    ids=str,
)
def test_tokenizer_config_is_read_as_by_transformers(folder: Path, config: dict[str, object]) -> None:
    write_config(folder, **config)
    found, reference = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert found.vocab_size == len(reference)
    assert found.special_tokens == reference.special_tokens_map
    for text in [*ODD, "<|z|><|b|><|a|><|y|>"]:
        for special in (True, False):
            assert found.encode(text, special) == reference.encode(text, add_special_tokens=special)
        ids = found.encode(text)
        for skip in (True, False):
            assert found.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
            streamed = IncrementalDetokenizer(found, skip_special_tokens=skip)
            assert "".join(map(streamed.add, ids)) + streamed.flush() == found.decode(ids, skip)


def test_chat_templates_are_found_as_by_transformers(folder: Path) -> None:
    write_config(folder, chat_template="config")
    assert Tokenizer.load(folder).chat_template == "config"
    write_config(folder, chat_template=[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    assert Tokenizer.load(folder).chat_text([{"role": "user"}], tools=[{}]) == "t"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).chat_template == "file" == AutoTokenizer.from_pretrained(folder).get_chat_template()
    (folder / "mine.jinja").write_text("mine")
    assert Tokenizer.load(folder, str(folder / "mine.jinja")).chat_template == "mine"
    with pytest.raises(ArgumentError, match="--chat-template"):
        Tokenizer.load(folder, "/no/such/file")


def test_byte_order_marks_are_ignored(folder: Path) -> None:
    write_config(folder, bos_token="<s>")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "own"}))
    (folder / "mine.jinja").write_text("mine")

    def loaded(template: str | None = None) -> list[object]:
        found = Tokenizer.load(folder, template)
        return [found.encode("some text"), found.special_tokens, found.chat_template]

    plain = [loaded(), loaded(str(folder / "mine.jinja"))]
    assert plain[0][2] == "own"
    for file in sorted(folder.glob("*.j*")):
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
        assert [loaded(), loaded(str(folder / "mine.jinja"))] == plain, file.name
    (folder / "chat_template.jinja").write_bytes(codecs.BOM_UTF8 + b"file")
    assert Tokenizer.load(folder).chat_template == "file"


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load"):
        Tokenizer.load(tmp_path)


def test_vocabulary_and_merges_are_converted_and_cached(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path_factory.mktemp("cache")))
    expected = Tokenizer.load(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    write_config(folder, tokenizer_class="GPT2Tokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for _ in range(2):  # converted, then read from the cache
        assert Tokenizer.load(folder).encode(ODD[0]) == expected.encode(ODD[0])
        monkeypatch.setattr(subprocess, "run", None)


def test_neither_torch_nor_transformers_is_imported(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stoker_engine.tokens.tokenizer import Tokenizer;"
        "t = Tokenizer.load(Path(sys.argv[1]), '{{ messages[0].content }}');"
        "assert t.render_chat([{'role': 'user', 'content': 'hello'}]);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def _write_gguf(path: Path, model: str, architecture: str, tokens: list[str], **fields: object) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("output_norm.weight", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_level_gguf(pre: str, path: Path, backend: Backend) -> Path:
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    return _write_gguf(
        path,
        "gpt2",
        "llama",
        tokens,
        tokenizer_pre=pre,
        token_types=kinds,
        token_merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=True,
        chat_template="{{ messages }}",
    )


def _sentencepiece_gguf(architecture: str, path: Path, backend: Backend) -> Path:
    del backend
    characters = sorted(set("".join(ODD).replace(" ", "▁")) - set("\x00"))
    words = [
        "▁H",
        "▁He",
        "ll",
        "llo",
        "▁Hello",
        "▁w",
        "or",
        "▁wor",
        "▁world",
        "▁▁",
        "▁▁▁▁",
        "12",
        "123",
        "aa",
        "aaaa",
    ]
    if architecture == "gemma3":
        words = [word.replace("▁▁▁▁", "    ").replace("▁▁", "  ") if not word.strip("▁") else word for word in words]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *words, "<think>"]
    tokens = list(dict.fromkeys(tokens))
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260), 4]
    scores = [0.0 if i < 259 else -float(i) for i in range(len(tokens))]
    return _write_gguf(
        path,
        "llama",
        architecture,
        tokens,
        token_scores=scores,
        token_types=kinds,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )


@pytest.mark.parametrize(
    "write, kind",
    [
        *((_byte_level_gguf, pre) for pre in ("gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o")),
        *((_sentencepiece_gguf, architecture) for architecture in ("llama", "gemma3", "phi3")),
    ],
)
def test_gguf_tokenizers_equal_those_of_transformers(
    write: Callable[[str, Path, Backend], Path],
    kind: str,
    byte_level: Backend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    path = write(kind, tmp_path / "model.gguf", byte_level)
    found = Tokenizer.load(path)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ODD:
        ids = found.encode(text)
        assert ids == reference.encode(text), text
        assert found.decode(ids, False) == reference.decode(ids), text
    assert found.chat_template == reference.chat_template


def test_demo_models_tokenizer_round_trips(demo_gguf: Path) -> None:
    found = Tokenizer.load(demo_gguf)
    assert found.encode("The capital of France is")[:3] == [2, 818, 5279]
    for text in ODD[:4]:  # a round trip; the whole conversion is compared in the slow test
        assert found.decode(found.encode(text)) == text


@pytest.mark.slow
def test_demo_models_tokenizer_equals_that_of_transformers(demo_gguf: Path) -> None:
    found = Tokenizer.load(demo_gguf)
    reference = AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    source = Path(__file__).read_text()
    for text in [*ODD, source, *source.splitlines(), *"".join(map(chr, range(0x20, 0x3000, 7)))]:
        assert found.encode(text) == reference.encode(text), text


def test_unknown_pre_tokenizer_is_refused(byte_level: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="--tokenizer"):
        Tokenizer.load(_byte_level_gguf("no-such-split", tmp_path / "model.gguf", byte_level))
