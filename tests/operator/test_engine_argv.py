"""One function writes the engine's command line, and the engine reads the same back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_engine.contract.serve_args import ServeArgs
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused
from stoker_operator.manifests.engine_argv import FIELDS, serve_args
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.placement import place

positive = st.integers(1, 2**31 - 1)
engines = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
        "kvCacheDtype": st.sampled_from(["auto", "fp8", "fp8_e5m2", "fp8_e4m3"]),
        "maxNumSeqs": positive,
        "maxNumBatchedTokens": positive,
        "maxModelLen": positive,
        "gpuMemoryUtilizationPercent": st.integers(1, 100),
        "enablePrefixCaching": st.booleans(),
    },
)


@given(engine=engines, template=st.none() | st.text(min_size=1), tensor=st.sampled_from([1, 2, 4]))
def test_the_engine_reads_back_what_the_operator_wrote(engine: Any, template: str | None, tensor: int) -> None:
    spec = Spec.model_validate(
        {
            "model": {"source": "hf://org/name", "revision": "main", "servedNames": ["a", "b"]},
            "hardware": {"accelerator": "nvidia-l4", "count": 4},
            "parallelism": {"tensor": tensor},
            "engine": engine,
        }
    )
    args = serve_args(spec, place(spec, Catalogue.load()), chat_template=template)
    assert ServeArgs.from_argv(args.to_argv()) == args
    assert args.engine.model == "org/name"
    assert args.engine.served_model_name == ("a", "b")
    assert args.engine.tensor_parallel_size * args.engine.data_parallel_size == 4
    assert args.frontend.chat_template == template
    if "gpuMemoryUtilizationPercent" in engine:
        assert args.engine.gpu_memory_utilization == engine["gpuMemoryUtilizationPercent"] / 100


@pytest.mark.parametrize(
    ("source", "model", "name"),
    [
        ("hf://org/name", "org/name", "org/name"),
        ("pvc://claim/a/b", "/models/a/b", "b"),
        ("demo://gemma-3-270m", "demo://gemma-3-270m", "gemma-3-270m"),
        ("file:///a/b.gguf", "/a/b.gguf", "b.gguf"),
    ],
)
def test_the_source_names_the_model(endpoint: Any, catalogue: Catalogue, source: str, model: str, name: str) -> None:
    spec = endpoint(model={"source": source}).spec
    args = serve_args(spec, place(spec, catalogue)).engine
    assert (args.model, args.served_model_name) == (model, (name,))


def test_what_nobody_decided_is_left_to_the_engine(endpoint: Any, catalogue: Catalogue) -> None:
    spec = endpoint().spec
    words = serve_args(spec, place(spec, catalogue)).to_argv()
    assert words == ["demo://gemma-3-270m", "--served-model-name", "gemma-3-270m", "--device=cpu"]


def test_args_are_for_what_has_no_field(endpoint: Any, catalogue: Catalogue) -> None:
    spec = endpoint(engine={"args": ["--seed=7", "--block-size", "32", "--dtype=float32"]}).spec
    args = serve_args(spec, place(spec, catalogue)).engine
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
        ({"args": ["--enable-lora"]}, "spec.engine.args: arguments: unrecognized arguments: --enable-lora"),
        ({"args": ["other-model"]}, "spec.engine.args: arguments: unrecognized arguments: other-model"),
        ({"args": ["--port=80"]}, "spec.engine.args: --port is not the endpoint's to choose; remove it"),
        ({"args": ["--help"]}, "spec.engine.args: --help starts no engine"),
        ({"args": ["-hx"]}, "spec.engine.args: "),
        ({"args": ["--block-size=3"]}, "spec.engine.args: --block-size: must be a power of two, got 3"),
        ({"args": ["--seed=x"]}, "spec.engine.args: --seed: "),
    ],
)
def test_args_the_engine_would_refuse_are_refused_before(
    endpoint: Any, catalogue: Catalogue, engine: Any, expected: str
) -> None:
    spec = endpoint(engine=engine).spec
    with pytest.raises(Refused) as refused:
        serve_args(spec, place(spec, catalogue))
    assert str(refused.value).startswith(expected)


def test_a_flag_may_repeat_what_a_field_says(endpoint: Any, catalogue: Catalogue) -> None:
    spec = endpoint(engine={"args": ["--max-num-seqs=16", "--kv-cache-dtype=auto"], "maxNumSeqs": 16}).spec
    assert serve_args(spec, place(spec, catalogue)).engine.max_num_seqs == 16


def test_every_field_that_decides_an_argument_is_named() -> None:
    known = {field for cls in (ServeArgs.parser().parse_args(["m"]),) for field in vars(cls)}
    assert set(FIELDS) <= known
