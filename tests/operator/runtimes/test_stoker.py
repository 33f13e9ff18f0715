"""The operator writes the engine's command line, and the engine's parser reads it back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_engine.contract.names import KV_CACHE_DTYPES
from stoker_engine.contract.serve_args import ServeArgs
from stoker_operator.api.schema import structural
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused
from stoker_operator.runtimes.arguments import FIELDS
from stoker_operator.runtimes.registry import runtime
from stoker_operator.runtimes.stoker import serve_args

from .conftest import planned

positive = st.integers(1, 2**31 - 1)
engines = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
        "kvCacheDtype": st.sampled_from(KV_CACHE_DTYPES),
        "maxNumSeqs": positive,
        "maxNumBatchedTokens": positive,
        "maxModelLen": positive,
        "gpuMemoryUtilizationPercent": st.integers(1, 100),
        "enablePrefixCaching": st.booleans(),
    },
)


@given(
    engine=engines,
    template=st.none() | st.text(min_size=1),
    tensor=st.sampled_from([1, 2, 4]),
    drain=st.none() | st.integers(0, 86400),
    keys=st.none() | st.just("/keys"),
)
def test_engine_parses_the_operators_command_line(
    engine: Any, template: str | None, tensor: int, drain: int | None, keys: str | None
) -> None:
    spec = Spec.model_validate(
        {
            "model": {
                "source": "hf://org/name",
                "revision": "main",
                "servedNames": ["a", "b"],
                "trustRemoteCode": tensor == 2,
            },
            "hardware": {"accelerator": "nvidia-l4", "count": 4},
            "parallelism": {"tensor": tensor},
            "engine": engine,
            "rollout": {} if drain is None else {"drainSeconds": drain},
        }
    )
    plan = planned(spec)
    args = serve_args(spec, plan, chat_template=template, api_keys=keys)
    assert ServeArgs.from_argv(args.to_argv()) == args
    assert runtime("stoker").invocation(spec, plan, chat_template=template, api_keys=keys).words == (
        "serve",
        *args.to_argv(),
    )
    assert args.engine.model == "org/name"
    assert args.engine.served_model_name == ("a", "b")
    assert args.engine.trust_remote_code is (tensor == 2)
    assert args.engine.tensor_parallel_size * args.engine.data_parallel_size == 4
    assert args.engine.gpu_memory_utilization == engine.get("gpuMemoryUtilizationPercent", 92) / 100
    assert args.frontend.chat_template == template
    assert args.frontend.api_key_file == keys
    assert args.frontend.shutdown_timeout == (30 if drain is None else drain)


@pytest.mark.parametrize(
    ("source", "model", "name"),
    [
        ("hf://org/name", "org/name", "org/name"),
        ("pvc://claim/a/b", "/models/a/b", "b"),
        ("demo://gemma-3-270m", "demo://gemma-3-270m", "gemma-3-270m"),
        ("file:///a/b.gguf", "/a/b.gguf", "b.gguf"),
    ],
)
def test_source_determines_the_models_name(endpoint: Any, source: str, model: str, name: str) -> None:
    spec = endpoint(model={"source": source}).spec
    args = serve_args(spec, planned(spec)).engine
    assert (args.model, args.served_model_name) == (model, (name,))


def test_unset_values_are_left_to_the_engine(endpoint: Any) -> None:
    spec = endpoint().spec
    words = serve_args(spec, planned(spec)).to_argv()
    assert words == [
        *("demo://gemma-3-270m", "--served-model-name", "gemma-3-270m", "--device=cpu"),
        "--max-engine-restarts=3",  # pods keep listening while the engine restarts
    ]


def test_planned_length_is_passed_to_the_engine(endpoint: Any) -> None:
    spec = endpoint().spec
    assert serve_args(spec, planned(spec, max_model_len=4096)).engine.max_model_len == 4096


def test_arguments_set_options_without_a_field(endpoint: Any) -> None:
    spec = endpoint(engine={"args": ["--seed=7", "--block-size", "32", "--dtype=float32"]}).spec
    args = serve_args(spec, planned(spec)).engine
    assert (args.seed, args.block_size, args.dtype) == (7, 32, "float32")


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            {"args": ["--max-num-seqs=8"], "maxNumSeqs": 16},
            "spec.engine.args: --max-num-seqs contradicts spec.engine.maxNumSeqs, which is 16; set",
        ),
        ({"args": ["--kv-cache-dtype=fp8"]}, "spec.engine.args: --kv-cache-dtype contradicts spec.engine.kvCacheDtype"),
        (
            {"args": ["--gpu-memory-utilization=0.5"]},
            "spec.engine.args: --gpu-memory-utilization contradicts spec.engine.gpuMemoryUtilizationPercent",
        ),
        (
            {"args": ["--trust-remote-code"]},
            "spec.engine.args: --trust-remote-code contradicts spec.model.trustRemoteCode, which is false; set",
        ),
        (
            {"args": ["--shutdown-timeout=5"]},
            "spec.engine.args: --shutdown-timeout contradicts spec.rollout.drainSeconds, which is 30; set",
        ),
        (
            {"args": ["--tensor-parallel-size=2"]},
            "spec.engine.args: --tensor-parallel-size contradicts spec.parallelism",
        ),
        (
            {"args": ["--pipeline-parallel-size=2"]},
            "spec.engine.args: --pipeline-parallel-size contradicts spec.paralle",
        ),
        (
            {"args": ["--served-model-name", "a", "b"]},
            "spec.engine.args: --served-model-name contradicts spec.model.se",
        ),
        ({"args": ["--device=cuda"]}, "spec.engine.args: --device contradicts spec.hardware.accelerator, which is cpu"),
        (
            {"args": ["--fully-sharded-loras"]},
            "spec.engine.args: --fully-sharded-loras is a flag of vLLM that runtime stoker does not have; remove it, "
            "or set spec.engine.runtime: vllm",
        ),
        (
            {"args": ["--seed=1", "--speculative_config={}"]},
            "spec.engine.args: --speculative_config is a flag of vLLM that runtime stoker does not have",
        ),
        ({"args": ["-sc.method", "ngram"]}, "spec.engine.args: -sc.method is a flag of vLLM that runtime stoker does"),
        ({"args": ["--sead=1"]}, "spec.engine.args: there is no flag --sead; did you mean --seed?"),
        ({"args": ["--xyzzy"]}, "spec.engine.args: there is no flag --xyzzy; see `stoker serve --help`"),
        ({"args": ["other-model"]}, "spec.engine.args: 'other-model' is not the value of a flag; remove it"),
        ({"args": ["--port=80"]}, "spec.engine.args: --port cannot be set for an endpoint; remove it"),
        *(
            (
                {"args": [word]},
                f"spec.engine.args: {word.partition('=')[0]} cannot be set for an endpoint; remove it: a ",
            )
            for word in ("--nnodes=2", "--node-rank=1", "--master-addr=other", "--master-port=1", "--headless")
        ),
        (
            {"args": ["--tensor-parallel-size=2"]},
            "spec.engine.args: --tensor-parallel-size contradicts spec.parallelis",
        ),
        (
            {"args": ["--data-parallel-size=2"]},
            "spec.engine.args: --data-parallel-size contradicts spec.parallelism.da",
        ),
        (
            {"args": ["--enable-expert-parallel"]},
            "spec.engine.args: --enable-expert-parallel contradicts spec.parallel",
        ),
        (
            {"args": ["--ssl-cert-reqs=2", "--ssl-ca-certs=a", "--ssl-certfile=b"]},
            "spec.engine.args: --ssl-cert-reqs=2 rejects the kubelet's probes",
        ),
        ({"args": ["--help"]}, "spec.engine.args: --help starts no engine"),
        ({"args": ["-hx"]}, "spec.engine.args: "),
        ({"args": ["--block-size=3"]}, "spec.engine.args: --block-size: must be a power of two, got 3"),
        ({"args": ["--seed=x"]}, "spec.engine.args: --seed: "),
        ({"quantization": "awq", "args": ["--quantization=gptq"]}, "spec.engine.args: --quantization contradicts"),
    ],
)
def test_arguments_that_the_engine_would_refuse_are_refused(endpoint: Any, engine: Any, expected: str) -> None:
    spec = endpoint(engine=engine).spec
    with pytest.raises(Refused) as refused:
        serve_args(spec, planned(spec))
    assert str(refused.value).startswith(expected)


def test_argument_may_repeat_the_value_of_a_field(endpoint: Any) -> None:
    spec = endpoint(engine={"args": ["--max-num-seqs=16", "--kv-cache-dtype=auto"], "maxNumSeqs": 16}).spec
    assert serve_args(spec, planned(spec)).engine.max_num_seqs == 16


def test_https_is_detected_from_the_arguments(endpoint: Any) -> None:
    stoker = runtime("stoker")
    assert not stoker.speaks_tls(endpoint().spec)
    assert stoker.speaks_tls(endpoint(engine={"args": ["--ssl-certfile=/tls/tls.crt"]}).spec)
    assert not stoker.speaks_tls(endpoint(engine={"args": ["--nonsense", "--ssl-certfile=/tls/tls.crt"]}).spec)


def test_longer_shutdown_grace_is_counted(endpoint: Any) -> None:
    spec = endpoint(engine={"args": ["--shutdown-grace=12.5"]}).spec
    assert runtime("stoker").invocation(spec, planned(spec)).grace == 12.5


def test_unknown_runtime_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Refused, match=r"^spec\.engine\.runtime: there is no runtime tgi; use stoker or vllm$"):
        runtime("tgi")


@pytest.mark.parametrize("path", FIELDS.values())
def test_every_mapped_field_exists_in_the_schema(path: str) -> None:
    schema = structural(Spec)
    for step in path.split(".")[1:]:
        schema = schema["properties"][step]
