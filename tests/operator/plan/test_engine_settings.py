"""Settings that decide how memory is used: fields, arguments, and the runtimes' defaults."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.exec import kv_cache
from stoker_engine.exec.kv_cache import plan_kv_cache
from stoker_engine.sizing.graph_memory import are_captured
from stoker_engine.sizing.memory import Device
from stoker_engine.sizing.weight_sizes import Sharding
from stoker_operator.api.manifest import parse
from stoker_operator.api.violation import Refused
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.engine_settings import EngineSettings, engine_settings
from stoker_operator.plan.planner import plan
from stoker_operator.runtimes.stoker import serve_args

from .conftest import LLAMA_8B, document

DEFAULTS = EngineArgs(model="m")
TINY = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "dtype": "bfloat16",
    }
)


def settings(accelerator: str = "nvidia-l4", **engine: Any) -> EngineSettings:
    spec = parse(document(LLAMA_8B, accelerator, **engine)).spec
    memory = Catalogue.load().accelerator(accelerator).memory_mib
    return engine_settings(spec, memory and memory * 1024**2, accelerator)


def test_absent_settings_have_the_engines_defaults() -> None:
    found = settings(runtime="stoker")
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 2048)
    assert (found.utilization, found.block_size) == (DEFAULTS.gpu_memory_utilization, DEFAULTS.block_size)
    assert found.max_model_len is found.num_blocks is found.kv_cache_memory_bytes is None


@pytest.mark.parametrize("runtime", ["stoker", "vllm"])
@pytest.mark.parametrize(
    ("accelerator", "tokens", "sequences"),
    [
        ("nvidia-l4", 2048, 256),
        ("nvidia-a100-80gb", 2048, 256),
        ("nvidia-h100-80gb", 8192, 1024),
        ("nvidia-h200", 8192, 1024),
        ("nvidia-b200", 16384, 1024),
        ("amd-mi300x", 16384, 1024),
    ],
)
def test_limits_of_a_step_depend_on_the_accelerator(
    accelerator: str, tokens: int, sequences: int, runtime: str
) -> None:
    found = settings(accelerator, runtime=runtime)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, sequences)


def test_limits_of_a_step_on_a_cpu_do_not_depend_on_its_memory() -> None:
    spec = parse(document("demo://gemma-3-270m", "cpu", runtime="stoker")).spec
    for gib in (0, 4, 70, 1000):
        found = engine_settings(spec, gib << 30, "cpu")
        assert (found.max_num_batched_tokens, found.max_num_seqs) == (2048, 256)


@pytest.mark.parametrize(
    "words", [[], ["--long-prefill-token-threshold=0"], ["--long-prefill-token-threshold", "512"], ["--max-num-seqs=9"],
              ["--max-num-batched-tokens=4K"], ["--max-num-seqs", "9", "--max-num-batched-tokens", "77"]]
)  # fmt: skip
def test_engine_chooses_the_limits_that_are_planned(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For every accelerator of the catalogue, by the memory and a name like its driver's."""
    catalogue = Catalogue.load()
    for key in catalogue.accelerators:
        memory = catalogue.accelerator(key).memory_mib
        if memory is None:
            continue
        planned = settings(key, runtime="stoker", args=words)
        # torch reports some MiB less than the driver; no accelerator is so close to a limit that it would matter.
        assert all(abs(memory / 1024 - limit) > 0.02 * limit for limit in (70, 160)), key
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache, "memory_bytes", lambda device, sharers, memory=memory: memory * 1024**2)
            patch.setattr(kv_cache, "device_name", lambda device, key=key: key.upper().replace("-", " "))
            args = ServeArgs.from_argv(["m", *words]).engine
            found = plan_kv_cache(args, TINY, torch.bfloat16, torch.device("cuda"))
        assert (found.max_num_seqs, found.step_tokens) == (planned.max_num_seqs, planned.max_num_batched_tokens), key


def test_field_overrides_an_argument_which_overrides_the_default() -> None:
    words = ["--max-num-seqs", "7", "--block-size=32", "--gpu-memory-utilization=0.5", "--max_model_len=99"]
    found = settings(args=words)
    assert (found.max_num_seqs, found.block_size, found.utilization, found.max_model_len) == (7, 32, 0.5, 99)
    found = settings(args=words, maxNumSeqs=8, gpuMemoryUtilizationPercent=80)
    assert (found.max_num_seqs, found.utilization) == (8, 0.8)
    found = settings(args=["--num-gpu-blocks-override=5", "--kv-cache-memory-bytes=6"])
    assert (found.num_blocks, found.kv_cache_memory_bytes) == (5, 6)


@pytest.mark.parametrize(
    "words",
    [
        ["--block-size=0"],
        ["--block-size=-1"],
        ["--block-size"],
        ["--block-size=²"],
        ["--gpu-memory-utilization=nan"],
        ["--gpu-memory-utilization=inf"],
        ["--gpu-memory-utilization=0"],
        ["--num-gpu-blocks-override=" + "9" * 400],
        ["--kv-cache-memory-bytes=" + "9" * 400],
        ["--max-num-batched-tokens=" + "9" * 15],
        ["--max-model-len=-1"],
    ],
)
def test_malformed_arguments_are_left_to_the_runtime(words: list[str]) -> None:
    try:
        plan(parse(document(LLAMA_8B, "nvidia-h100-80gb", 1, args=words)).spec, Catalogue.load())
    except Refused as refused:
        assert refused.violations[0].reason == "DoesNotFit"


@pytest.mark.parametrize("memory", ["0", "9e999", "1n", "16E", 0])
def test_extreme_memory_limits_are_planned_or_refused(memory: Any) -> None:
    hardware = {"resources": {"limits": {"memory": memory}}}
    spec = parse(document("demo://gemma-3-270m", "cpu", hardware=hardware, runtime="stoker")).spec
    try:
        assert plan(spec, Catalogue.load()).max_model_len == 32768
    except Refused as refused:
        assert refused.violations[0].reason == "DoesNotFit"


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ({"maxNumBatchedTokens": 8192}, "--max-num-batched-tokens=8K"),
        ({"maxNumSeqs": 1000}, "--max-num-seqs=1k"),
        ({"maxModelLen": 4096}, "--max-model-len=4K"),
    ],
)
def test_sizes_are_parsed_as_by_the_engine(field: dict[str, int], word: str) -> None:
    def planned(**engine: Any) -> Any:
        hardware = {"resources": {"limits": {"memory": "8Gi"}}}
        spec = parse(document("demo://gemma-3-270m", "cpu", hardware=hardware, runtime="stoker", **engine)).spec
        return plan(spec, Catalogue.load())

    assert planned(args=[word]) == planned(**field)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (0, 0, 0)),
        (["--max-loras=4"], (0, 0, 0)),
        (["--enable-lora", "--no-enable-lora"], (0, 0, 0)),
        (["--enable-lora"], (DEFAULTS.max_loras, DEFAULTS.max_loras, DEFAULTS.max_lora_rank)),
        (["--enable-lora", "--max-loras", "4", "--max-cpu-loras=50", "--max-lora-rank=64"], (4, 50, 64)),
    ],
)
def test_adapters_are_counted_only_for_runtime_stoker(words: list[str], expected: tuple[int, int, int]) -> None:
    found = settings(runtime="stoker", args=words)
    assert (found.max_loras, found.num_resident_adapters, found.max_lora_rank) == expected
    assert settings(runtime="vllm", args=words).max_loras == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ()),
        (["--lora-target-modules", "q_proj", "v_proj", "--max-loras", "2"], ("q_proj", "v_proj")),
        (["--lora_target_modules=o_proj"], ("o_proj",)),
        (["--lora-target-modules"], ()),
    ],
)
def test_lora_target_modules_are_read_from_arguments(words: list[str], expected: tuple[str, ...]) -> None:
    assert settings(runtime="stoker", args=["--enable-lora", *words]).lora_target_modules == expected
    assert settings(runtime="stoker", args=words).lora_target_modules == ()


@pytest.mark.parametrize(
    ("words", "has_graphs"),
    [
        ([], True),
        (["--enforce-eager"], False),
        (["--enforce_eager"], False),
        (["--enforce-eager", "--no-enforce-eager"], True),
        (["--no-enforce-eager", "--enforce-eager"], False),
        (["--attention-backend", "sdpa"], False),
        (["--attention-backend=flash-attn"], False),
        (["--attention-backend=sdpa", "--attention_backend=triton"], True),
        (["--attention-backend=auto", "--enforce-eager"], False),
    ],
)
def test_graphs_are_planned_if_the_engine_captures_them(words: list[str], has_graphs: bool) -> None:
    args = ServeArgs.from_argv(["m", *(word.replace("_", "-") for word in words)]).engine
    assert are_captured(args.enforce_eager, args.attention_backend) == has_graphs
    assert settings(runtime="stoker", args=words).has_graphs == has_graphs


@pytest.mark.parametrize(
    ("words", "has_graphs"), [(["--attention-backend=FLASHINFER"], True), (["--enforce-eager"], False)]
)
def test_vllm_captures_graphs_with_each_backend(words: list[str], has_graphs: bool) -> None:
    assert settings(runtime="vllm", args=words).has_graphs == has_graphs


#: A million tokens, so that memory limits the length; and a small model whose cache holds millions.
LONG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1 << 20,
    "dtype": "bfloat16",
}
SMALL: dict[str, Any] = {
    **LONG,
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}


@pytest.mark.parametrize("seed", range(40))
def test_engine_allocates_the_planned_blocks_on_an_accelerator(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets the arguments that the plan renders, and the accelerator's memory in the catalogue."""
    dice = random.Random(seed)
    model, key, tensor = dice.choice((LONG, SMALL)), dice.choice(("nvidia-l4", "nvidia-h100-80gb")), dice.choice((1, 2))
    words = dice.choice(
        ([], ["--enforce-eager"], ["--attention-backend=sdpa"], ["--attention-backend", "triton"], ["--block-size=64"],
         ["--enable-lora", "--max-loras=2"], ["--num-gpu-blocks-override=3000"], ["--kv-cache-memory-bytes=2G"])
    )  # fmt: skip
    engine = {
        "maxModelLen": dice.choice((None, 100, 4096, 30_000)),
        "maxNumSeqs": dice.choice((None, 1, 100)),
        "maxNumBatchedTokens": dice.choice((None, 512, 4096)),
    }
    stated = {name: value for name, value in engine.items() if value is not None}
    spec = parse(document("hf://org/m", key, 2, parallelism={"tensor": tensor, "data": 2 // tensor}, runtime="stoker",
                          image="mine:1", args=words, **stated)).spec  # fmt: skip
    planned = plan(spec, Catalogue.load(), model)
    memory = Catalogue.load().accelerator(key).memory_mib
    assert planned.estimate is not None and memory is not None
    monkeypatch.setattr(kv_cache, "memory_bytes", lambda device, sharers: memory * 1024**2)
    monkeypatch.setattr(kv_cache, "device_name", lambda device: key)
    args = serve_args(spec, planned).engine
    found = plan_kv_cache(args, ModelConfig.from_dict(model), torch.bfloat16, torch.device("cuda"))
    assert found.num_blocks == planned.estimate.kv_blocks
    assert found.max_model_len == planned.max_model_len
    reserved = planned.estimate.reserved_bytes_per_gpu - found.graph_bytes
    assert reserved == Device(0, 1.0, on_cpu=False, sharding=Sharding(tensor=tensor)).allowances
    assert (found.graph_bytes == 0) == (words[:1] in (["--enforce-eager"], ["--attention-backend=sdpa"]))
