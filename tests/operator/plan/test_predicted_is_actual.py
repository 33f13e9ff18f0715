"""Predicted and actual numbers of KV blocks are equal: a manifest is planned and rendered, and the engine is started
with the rendered arguments.

The container is simulated: its memory limit is the file that the kernel would write. Everything else is real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from stoker_common.subprocesses import host_memory
from stoker_engine.architectures.model_config import ModelConfig, read_config
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.engine import Engine
from stoker_engine.exec.kv_cache import plan_kv_cache
from stoker_operator.api.manifest import parse
from stoker_operator.manifests.children import children
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.planner import plan
from stoker_operator.runtimes.stoker import serve_args

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a large cache."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=4, num_key_value_heads=4)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma with windows, so that the cache has several groups."""
    folder = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(0)
    config = Gemma3TextConfig(**_SIZES, num_hidden_layers=6, num_key_value_heads=4, sliding_window=512)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model", ["llama", "gemma"])
@pytest.mark.parametrize(
    ("memory", "engine"),
    [
        ("2Gi", {}),
        ("1700Mi", {"dtype": "bfloat16", "gpuMemoryUtilizationPercent": 80}),
        ("2G", {"maxNumSeqs": 8, "maxNumBatchedTokens": 512, "args": ["--block-size=32"]}),
        ("3Gi", {"maxModelLen": 1024, "args": ["--kv-cache-memory-bytes=50000000"]}),
        ("2Gi", {"args": ["--enable-lora", "--max-cpu-loras=50", "--max-lora-rank=64"]}),
        ("2Gi", {"args": ["--enable-lora", "--max-loras=40", "--lora-target-modules", "q_proj", "down_proj"]}),
    ],
)
def test_predicted_blocks_are_allocated_blocks(
    model: str,
    memory: str,
    engine: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder: Path = request.getfixturevalue(model)
    endpoint = parse(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "InferenceEndpoint",
            "metadata": {"name": "tiny"},
            "spec": {
                "model": {"source": f"file://{folder}"},
                "hardware": {"accelerator": "cpu", "resources": {"limits": {"memory": memory}}},
                "engine": engine,
            },
        }
    )
    planned = plan(endpoint.spec, Catalogue.load(), read_config(folder))
    assert planned.estimate is not None
    objects = children(Owner("tiny"), endpoint.spec, planned)
    deployment = next(each for each in objects if each["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    limit = tmp_path / "memory.max"
    limit.write_text(f"{_bytes(container['resources']['limits']['memory'])}\n")
    monkeypatch.setattr(host_memory, "_CGROUP_LIMITS", (str(limit),))

    args = ServeArgs.from_argv(container["args"][1:]).engine
    assert args.num_gpu_blocks_override is None
    started = Engine.from_args(args)

    assert started.info.num_blocks == planned.estimate.kv_blocks
    assert started.info.max_model_len == planned.max_model_len == planned.estimate.max_model_len


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture, whose experts can be distributed over ranks."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    config = MixtralConfig(**_SIZES, num_hidden_layers=3, num_key_value_heads=2, num_local_experts=3)
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


_LAYOUTS: list[dict[str, int]] = [
    {"tensor": 2},
    {"tensor": 4},
    {"pipeline": 2},
    {"pipeline": 3, "tensor": 2},
    {"data": 2},
    {"tensor": 2, "data": 2},
]


@pytest.mark.parametrize("words", [[], ["--enable-lora", "--max-cpu-loras=200", "--max-lora-rank=64"]])
@pytest.mark.parametrize(
    ("model", "parallelism"),
    [
        *((model, layout) for model in ("llama", "gemma", "mixtral") for layout in _LAYOUTS),
        ("mixtral", {"tensor": 2, "expert": 2}),
    ],
)
def test_ranks_allocate_the_predicted_blocks(
    model: str,
    parallelism: dict[str, int],
    words: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank of a pod, by the calculation at its start."""
    folder: Path = request.getfixturevalue(model)
    memory = {"limits": {"memory": "12Gi"}}
    document = {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceEndpoint",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"source": f"file://{folder}"},
            "hardware": {"accelerator": "cpu", "resources": memory},
            "parallelism": parallelism,
            "engine": {"args": words},
        },
    }
    endpoint = parse(document)
    planned = plan(endpoint.spec, Catalogue.load(), read_config(folder))
    assert planned.estimate is not None
    limit = tmp_path / "memory.max"
    limit.write_text(f"{12 * 1024**3}\n")
    monkeypatch.setattr(host_memory, "_CGROUP_LIMITS", (str(limit),))
    monkeypatch.setattr(host_memory, "_machine_memory", lambda: 1 << 60)

    args = serve_args(endpoint.spec, planned).engine
    found = plan_kv_cache(args, ModelConfig.from_dict(read_config(folder)), torch.float32, torch.device("cpu"))
    assert found.num_blocks == planned.estimate.kv_blocks
    assert found.max_model_len == planned.max_model_len


def _bytes(memory: str) -> int:
    """Return the limit in bytes, as the kubelet writes it."""
    units = {"Gi": 1024**3, "Mi": 1024**2, "G": 1000**3}
    unit = next(unit for unit in units if memory.endswith(unit))
    return int(memory.removesuffix(unit)) * units[unit]
