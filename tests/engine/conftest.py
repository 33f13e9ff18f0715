"""Tiny random models made on the spot (`tiny_models`), and transformers as the reference that nobody here wrote."""

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
