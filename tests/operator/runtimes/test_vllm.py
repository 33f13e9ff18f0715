"""vLLM's command line, validated by vLLM's own parser."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stoker_operator.api.violation import Refused
from stoker_operator.plan.estimate import Estimate
from stoker_operator.runtimes import vllm_flags
from stoker_operator.runtimes.registry import runtime

from . import vllm_parser
from .conftest import planned

MODEL = {"source": "hf://org/name"}
VLLM = runtime("vllm")

#: Spec, sizes of the plan, and the values that vLLM must parse.
LINES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        {},
        {},
        {
            "model_tag": "org/name",
            "served_model_name": ["org/name"],
            "gpu_memory_utilization": 0.92,
            "tensor_parallel_size": 4,
            "data_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "kv_cache_dtype": "auto",
            "enable_expert_parallel": False,
            "trust_remote_code": False,
            "max_model_len": None,
            "enable_prefix_caching": None,
            "host": "::",
            "port": 8000,
        },
    ),
    (
        {
            "model": {
                "source": "hf://org/name",
                "revision": "refs/pr/1",
                "servedNames": ["a", "b"],
                "trustRemoteCode": True,
            },
            "parallelism": {"tensor": 1, "data": 2, "pipeline": 2},
            "engine": {
                "dtype": "bfloat16",
                "quantization": "fp8",
                "kvCacheDtype": "fp8_e4m3",
                "maxNumSeqs": 16,
                "maxNumBatchedTokens": 4096,
                "gpuMemoryUtilizationPercent": 80,
                "enablePrefixCaching": False,
                "args": [
                    "--enable-chunked-prefill",
                    "--seed",
                    "7",
                    "-cc.mode=3",
                    "--attention_config.backend",
                    "FLASH_ATTN",
                ],
            },
        },
        {"max_model_len": 32768, "expert": True},
        {
            "revision": "refs/pr/1",
            "served_model_name": ["a", "b"],
            "trust_remote_code": True,
            "pipeline_parallel_size": 2,
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "dtype": "bfloat16",
            "quantization": "fp8",
            "kv_cache_dtype": "fp8_e4m3",
            "max_num_seqs": 16,
            "max_num_batched_tokens": 4096,
            "max_model_len": 32768,
            "gpu_memory_utilization": 0.8,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "seed": 7,
        },
    ),
    (
        {"model": {"source": "pvc://claim/a/b"}, "engine": {"enablePrefixCaching": True}},
        {},
        {"model_tag": "/models/a/b", "served_model_name": ["b"], "enable_prefix_caching": True},
    ),
    (
        {"hardware": {"accelerator": "cpu"}},
        {"estimate": Estimate(1000, kv_bytes_per_gpu=2**30)},
        {"tensor_parallel_size": 1, "kv_cache_memory_bytes": 2**30},
    ),
    (
        # All spellings of arguments that fields already set; equal values are permitted.
        {
            "parallelism": {"tensor": 2, "data": 2},
            "engine": {
                "dtype": "float16",
                "maxModelLen": 8192,
                "maxNumBatchedTokens": 4000,
                "args": [
                    *("-tp", "2", "-dp=2", "--max_model_len=8K", "--max-num-batched-tokens", "4k", "--dtype=half"),
                    *("--gpu-memory-util=0.920", "--no-trust-remote-code", "--served-model-name", "org/name"),
                ],
            },
        },
        {},
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "max_model_len": 8192, "max_num_batched_tokens": 4000},
    ),
]


def spec_of(endpoint: Any, gpu: Any, parts: dict[str, Any]) -> Any:
    engine = {"runtime": "vllm", **parts.get("engine", {})}
    return endpoint(**{"model": MODEL, "hardware": gpu, **parts, "engine": engine}).spec


@pytest.mark.slow
def test_vllm_parses_the_operators_command_line(endpoint: Any, gpu: Any) -> None:
    specs = [(spec_of(endpoint, gpu, parts), plan) for parts, plan, _ in LINES]
    lines = [VLLM.invocation(spec, planned(spec, **plan), chat_template="{{ x }}").words for spec, plan in specs]
    flags, parsed = vllm_parser.parse([list(words[1:]) for words in lines])
    for (_, _, expected), values in zip(LINES, parsed, strict=True):
        assert isinstance(values, dict), values
        assert {name: values[name] for name in expected} == expected
        assert values["chat_template"] == "{{ x }}"

    text = f"# Flags of `vllm serve` of vLLM {vllm_flags.VERSION}: how many words follow, and the spellings.\n"
    text += "".join(f"{' '.join(flag)}\n" for flag in sorted(flags, key=lambda flag: flag[1]))
    if os.environ.get("STOKER_GOLDEN") == "write":
        vllm_flags.DATA.write_text(text)
    assert text == vllm_flags.DATA.read_text()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--max-model-len=4k"],
            "spec.engine.args: --max-model-len contradicts spec.engine.maxModelLen, which is 8192",
        ),
        (["--max_model_len", "auto"], "spec.engine.args: --max-model-len: 'auto' is not a number; set spec.engine.max"),
        (["-tp", "2"], "spec.engine.args: --tensor-parallel-size contradicts spec.parallelism.tensor, which is 4; set"),
        (["-tp=2"], "spec.engine.args: --tensor-parallel-size contradicts spec.parallelism.tensor, which is 4; set"),
        (["--tensor-par", "2"], "spec.engine.args: --tensor-parallel-size contradicts spec.parallelism.tensor"),
        (["-q", "awq"], "spec.engine.args: --quantization contradicts spec.engine.quantization, which is fp8; set"),
        (["--no-enable-prefix-caching"], "spec.engine.args: --enable-prefix-caching contradicts spec.engine.enablePr"),
        (["--device-memory-utilization=0.5"], "spec.engine.args: --gpu-memory-utilization contradicts spec.engine.gpu"),
        (["--trust-remote-code"], "spec.engine.args: --trust-remote-code contradicts spec.model.trustRemoteCode, whi"),
        (["-ep"], "spec.engine.args: --enable-expert-parallel contradicts spec.parallelism.expert, which is false; s"),
        (["--model", "other"], "spec.engine.args: --model contradicts spec.model.source, which is org/name; set"),
        (["--served-model-name", "a", "b"], "spec.engine.args: --served-model-name contradicts spec.model.servedNam"),
        (["other"], "spec.engine.args: 'other' is not the value of a flag; remove it"),
        (["--enable-lorra"], "spec.engine.args: vLLM 0.32.0 has no flag --enable-lorra; did you mean --enable-lora?"),
        (["--xyzzy=1"], "spec.engine.args: vLLM 0.32.0 has no flag --xyzzy; see `vllm serve --help=all`"),
        (["--enable"], "spec.engine.args: arguments: ambiguous option: --enable could match"),
        (["--seed"], "spec.engine.args: --seed: expected one argument"),
        (["--port", "80"], "spec.engine.args: --port cannot be set for an endpoint; remove it; see spec.service.po"),
        (["--uds=/x"], "spec.engine.args: --uds cannot be set for an endpoint; remove it"),
        (["--headless"], "spec.engine.args: --headless cannot be set for an endpoint"),
        (["--shutdown-timeout=9"], "spec.engine.args: --shutdown-timeout cannot be set for an endpoint; set spec.r"),
        (["--ssl-cert-reqs", "2"], "spec.engine.args: --ssl-cert-reqs=2 rejects the kubelet's probes"),
        (["--api-key=x"], "spec.engine.args: --api-key would override spec.auth.apiKeysSecretRef; remove"),
        (["--help=all"], "spec.engine.args: --help starts no engine"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(endpoint: Any, gpu: Any, args: list[str], expected: str) -> None:
    engine = {"maxModelLen": 8192, "enablePrefixCaching": True, "quantization": "fp8", "args": args}
    spec = spec_of(endpoint, gpu, {"engine": engine, "auth": {"apiKeysSecretRef": {"name": "s"}}})
    with pytest.raises(Refused) as refused:
        VLLM.invocation(spec, planned(spec))
    assert str(refused.value).startswith(expected)


def test_another_version_may_have_other_flags(endpoint: Any, gpu: Any) -> None:
    custom_spec = spec_of(endpoint, gpu, {"engine": {"image": "my/vllm:nightly", "args": ["--brand-new", "1"]}})
    assert VLLM.invocation(custom_spec, planned(custom_spec)).words[-2:] == ("--brand-new", "1")
    contradiction = spec_of(endpoint, gpu, {"engine": {"image": "my/vllm:nightly", "args": ["--brand-new", "-tp=9"]}})
    with pytest.raises(Refused, match="--tensor-parallel-size contradicts"):
        VLLM.invocation(contradiction, planned(contradiction))


def test_cpu_cache_size_is_the_planned_one(endpoint: Any) -> None:
    estimate = Estimate(1000, kv_bytes_per_gpu=2**30)
    spec = spec_of(endpoint, {"accelerator": "cpu"}, {})
    assert "--kv-cache-memory-bytes=1073741824" in VLLM.invocation(spec, planned(spec, estimate=estimate)).words
    assert not [word for word in VLLM.invocation(spec, planned(spec)).words if "kv-cache-memory" in word]
    explicit_spec = spec_of(endpoint, {"accelerator": "cpu"}, {"engine": {"args": ["--kv-cache-memory-bytes=5"]}})
    words = VLLM.invocation(explicit_spec, planned(explicit_spec, estimate=estimate)).words
    assert [word for word in words if "kv-cache-memory" in word] == ["--kv-cache-memory-bytes=5"]


def test_demo_model_is_refused_for_vllm(endpoint: Any) -> None:
    spec = endpoint(engine={"runtime": "vllm"}).spec
    with pytest.raises(Refused, match=r"^spec\.model\.source: only Stoker's own image contains the demo model; use"):
        VLLM.invocation(spec, planned(spec))


def test_startup_probe_covers_the_startup_timeout(endpoint: Any, gpu: Any) -> None:
    probes = VLLM.probes(spec_of(endpoint, gpu, {"rollout": {"startupTimeoutSeconds": 905}}))
    assert probes.startup.period * probes.startup.failures == 910


@pytest.mark.parametrize(
    ("spelling", "argument"),
    [
        ("--max-model-len", "max_model_len"),
        ("--max_model_len", "max_model_len"),
        ("-tp", "tensor_parallel_size"),
        ("--no-enable-lora", "enable_lora"),
        ("--compilation-config.pass_config.x", "compilation_config"),
        ("--xyzzy", None),
    ],
)
def test_flags_are_found_by_any_spelling(spelling: str, argument: str | None) -> None:
    flag = vllm_flags.find(spelling)
    assert (flag and flag.argument) == argument
