"""Adapters served by the real engine, over sockets: tokens equal PEFT's, through evictions, reloads and restarts."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs

from .conftest import CHAT_TEMPLATE, Serving, wait_until

pytest.importorskip("stoker_engine.lora.adapter_reader")

PROMPT = [5, 6, 7, 8, 9, 10, 11]
KEY = {"x-api-key": "admin"}


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """Folders of adapters, and PEFT's model with each."""
    root = tmp_path_factory.mktemp("adapters")
    models: dict[Path, Any] = {}
    for seed, name in enumerate("abc"):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config).eval()
        assert isinstance(model, PeftModel)
        model.save_pretrained(str(root / name))
        models[root / name] = model
    return models


@pytest.fixture
def served(tiny_llama: Path, models: dict[Path, Any], tmp_path: Path) -> Iterator[Serving]:
    """A server with adapter a, with room for two adapters in memory and one per step."""
    first, *_ = models
    (tmp_path / "keys").write_text("admin")
    shutil.copytree(first, tmp_path / "a")
    engine = EngineArgs(
        str(tiny_llama),
        served_model_name=("tiny",),
        dtype="float32",
        num_gpu_blocks_override=256,
        enable_lora=True,
        max_loras=1,
        max_cpu_loras=2,
    )
    frontend = FrontendArgs(
        shutdown_grace=0,
        max_engine_restarts=1,
        allow_runtime_lora_updating=True,
        admin_api_key_file=str(tmp_path / "keys"),
        lora_dir=(str(first.parent),),
        lora_modules=(f"a={tmp_path}/a",),
    )
    llm = AsyncLLM(engine, chat_template=CHAT_TEMPLATE)
    serving = Serving(ServeArgs(engine, frontend), llm)
    try:
        wait_until(lambda: (serving.service.is_loaded and serving.service.has_adapters) or serving.server.failure)
        yield serving
    finally:
        serving.call(serving.server.stop, 2)
        serving.join()
        llm.shutdown()


def _expected(model: Any) -> list[int]:
    generated = model.generate(
        input_ids=torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return list(generated[0, len(PROMPT) :].tolist())


def test_tokens_equal_pefts_through_evictions_reloads_and_restarts(served: Serving, models: dict[Path, Any]) -> None:
    expected = {folder.name: _expected(model) for folder, model in models.items()}
    folders = {folder.name: str(folder) for folder in models}
    assert len(set(map(tuple, expected.values()))) == 3

    def ask(model: str) -> httpx.Response:
        fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {"model": model, "prompt": PROMPT, **fields}
        return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)

    def tokens(model: str) -> list[int]:
        return list(ask(model).json()["choices"][0]["token_ids"])

    def load(name: str, folder: str, **fields: bool) -> None:
        body = {"lora_name": name, "lora_path": folders[folder], **fields}
        answer = httpx.post(f"{served.url}/v1/load_lora_adapter", json=body, headers=KEY, timeout=60)
        assert answer.status_code == 200, answer.text

    load("b", "b")
    load("c", "c")
    with ThreadPoolExecutor(12) as pool:  # one slot, two in memory, three adapters
        for name, found in zip("abc" * 8, pool.map(tokens, "abc" * 8), strict=True):
            assert found == expected[name]
    load("b", "c", load_inplace=True)  # its earlier prefix blocks are invalid now
    assert tokens("b") == expected["c"]

    client: Any = served.service.client
    shutil.rmtree(Path(served.service.adapters.get("a").module.path))  # type: ignore[union-attr]
    os.kill(client.engines[0].process.pid, signal.SIGKILL)
    wait_until(lambda: not client.is_ready)
    wait_until(lambda: client.is_ready)
    assert [tokens(name) for name in "bc"] == [expected["c"]] * 2
    lost = ask("a")
    assert lost.status_code == 503
    assert "LoRA" in lost.json()["error"]["message"]
    assert [model["id"] for model in httpx.get(f"{served.url}/v1/models").json()["data"]] == ["tiny", "a", "b", "c"]
    for name in "bc":
        body = {"lora_name": name}
        assert httpx.post(f"{served.url}/v1/unload_lora_adapter", json=body, headers=KEY).status_code == 200
        assert ask(name).status_code == 404
    assert ask("tiny").status_code == 200
