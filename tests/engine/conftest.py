"""Tiny random models made on the spot, and transformers as the reference that nobody here wrote.

Random weights are drawn wide (std 0.3 instead of 0.02), so that the two best logits are rarely close.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ..support.engine.guarded_cache import guard

_VOCABULARY = 512


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from several threads, and on a busy machine the threads wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def guarded_cache() -> Iterator[None]:
    """No engine of this process reads what it must not; see `guarded_cache`."""
    with pytest.MonkeyPatch.context() as patched:
        guard(patched)
        yield


def save_tokenizer(folder: Path) -> None:
    """Trains a small byte-level BPE tokenizer and saves it in `folder`."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog, again and again"] * 8, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def save_model(folder: Path, model: PreTrainedModel) -> Path:
    """Saves `model` and a tokenizer as a Hugging Face folder."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def tiny_llama_model(**overrides: Any) -> LlamaForCausalLM:
    """A random Llama with two layers and grouped KV heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": _VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **overrides,
        }
    )
    return LlamaForCausalLM(config).float().eval()


def tiny_gemma3_model(**overrides: Any) -> Gemma3ForCausalLM:
    """A random Gemma 3 with local and global layers and a short window."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{
            "vocab_size": _VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            **overrides,
        }
    )
    return Gemma3ForCausalLM(config).float().eval()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama, float32."""
    return save_model(tmp_path_factory.mktemp("tiny-llama"), tiny_llama_model())


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Gemma 3, float32."""
    return save_model(tmp_path_factory.mktemp("tiny-gemma3"), tiny_gemma3_model())


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The GGUF file of the demo model."""
    from stoker_engine.models.hub.demo import demo_model

    return demo_model("gemma-3-270m")


@pytest.fixture(scope="session")
def demo_reference(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The demo model's folder for transformers in float32: its own reading of the file takes half a minute, mostly for
    the vocabulary, so all workers share what one of them has read."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "demo-reference"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            model = AutoModelForCausalLM.from_pretrained(
                demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
            )
            del (
                model.hf_quantizer,
                model.config.quantization_config,
            )  # which refuse to be saved; the numbers are float32
            unfinished = folder.with_suffix(".part")
            model.save_pretrained(unfinished)
            unfinished.rename(folder)
    return folder


def engine_of(server: int) -> psutil.Process:
    """The engine's process of a server's; its tokenizer has another."""
    (engine,) = (
        child for child in psutil.Process(server).children() if "stoker_engine.processes.main" in child.cmdline()
    )
    return engine


AssertGreedy = Callable[[Path, list[int], list[int]], None]


@pytest.fixture(scope="session")
def assert_greedy() -> Iterator[AssertGreedy]:
    """Asserts that an output is transformers' greedy output.

    One forward pass over prompt + output tells: if each output token is the argmax of what precedes it, greedy
    decoding gives that output. A mismatch counts unless the reference's two best logits are within 1e-3 there.
    """
    loaded: dict[Path, PreTrainedModel] = {}

    def check(model: Path, prompt: list[int], output: list[int]) -> None:
        if model not in loaded:
            loaded.clear()
            loaded[model] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = loaded[model](torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        for position, (row, token) in enumerate(zip(logits, output, strict=True)):
            best = row.max()
            assert best - row[token] <= 1e-3, f"output token {position} is {token}, the reference has {row.argmax()}"
            if int(row.argmax()) != token:
                return  # a tie: what follows may differ

    yield check
