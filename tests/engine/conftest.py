"""Tiny random models, created on the fly (`tiny_models`), and transformers as the independent reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)

from ..support.engine.guarded_cache import guard
from ..support.engine.tiny_models import save_model, tiny_gemma3_model, tiny_llama_model
from ..support.processes import command_line


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices do not profit from several threads, which wait for each other on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def guarded_cache() -> Iterator[None]:
    """Engines of this process must not read foreign memory; see `guarded_cache`."""
    with pytest.MonkeyPatch.context() as patched:
        guard(patched)
        yield


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
    """Folder of the demo model for transformers in float32.

    transformers' reading of the GGUF file takes half a minute, mostly for the vocabulary, so all workers share one
    result.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "demo-reference"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            model = AutoModelForCausalLM.from_pretrained(
                demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
            )
            # The quantizer and its config cannot be saved; the weights are float32.
            del model.hf_quantizer, model.config.quantization_config
            unfinished = folder.with_suffix(".part")
            model.save_pretrained(unfinished)
            unfinished.rename(folder)
    return folder


def engine_of(server: int) -> psutil.Process:
    """Return the engine process of a server, which also has a tokenizer process."""
    (engine,) = (
        child for child in psutil.Process(server).children() if "stoker_engine.processes.main" in command_line(child)
    )
    return engine


AssertGreedy = Callable[[Path, list[int], list[int]], None]


@pytest.fixture(scope="session")
def assert_greedy() -> Iterator[AssertGreedy]:
    """Assert that an output is transformers' greedy output.

    One forward pass over prompt + output suffices: if each output token is the argmax of what precedes it, greedy
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
                return  # a tie: later tokens may differ

    yield check
