"""Arguments written as argv are read back equal; wrong words are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.names import DTYPES, KV_CACHE_DTYPES
from stoker_engine.contract.serve_args import ServeArgs

_names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1).filter(
    lambda text: not text.startswith("-")
)
_sizes = st.integers(1, 2**40)

serve_args = st.builds(
    ServeArgs,
    engine=st.builds(
        EngineArgs,
        model=_names,
        served_model_name=st.lists(_names, max_size=3).map(tuple),
        revision=st.none() | _names,
        dtype=st.sampled_from(DTYPES),
        max_model_len=st.none() | _sizes,
        seed=st.integers(0, 2**31),
        block_size=st.sampled_from([1, 16, 64]),
        gpu_memory_utilization=st.floats(0.01, 1),
        kv_cache_memory_bytes=st.none() | _sizes,
        kv_cache_dtype=st.sampled_from(KV_CACHE_DTYPES),
        enable_prefix_caching=st.booleans(),
        max_num_seqs=_sizes,
        tensor_parallel_size=st.integers(1, 16),
    ),
    frontend=st.builds(
        FrontendArgs, host=_names, port=st.integers(0, 65535), chat_template=st.none() | st.text(min_size=1)
    ),
)


@given(serve_args)
def test_arguments_survive_argv(args: ServeArgs) -> None:
    assert ServeArgs.from_argv(args.to_argv()) == args


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["demo://gemma-3-270m"], ("gemma-3-270m",)),
        (["org/name"], ("org/name",)),
        (["models/m-Q4_K_M.gguf"], ("models/m-Q4_K_M.gguf",)),
        (["models/m.gguf", "--served-model-name", "m", "m.gguf"], ("m", "m.gguf")),
    ],
)
def test_served_names_default_to_the_models_name(words: list[str], expected: tuple[str, ...]) -> None:
    assert ServeArgs.from_argv(words).model_names == expected


@pytest.mark.parametrize(
    "short, long",
    [
        ("-tp", "--tensor-parallel-size"),
        ("-pp", "--pipeline-parallel-size"),
        ("-dp", "--data-parallel-size"),
        ("-asc", "--api-server-count"),
    ],
)
def test_short_flags_are_read_and_written_long(short: str, long: str) -> None:
    args = ServeArgs.from_argv(["m", short, "2"])
    assert args == ServeArgs.from_argv([f"{short}=2", "m"])
    assert args.to_argv() == ["m", f"{long}=2"]
    with pytest.raises(ArgumentError) as refused:
        ServeArgs.from_argv(["m", short, "many"])
    assert refused.value.args[0].startswith(long)


def test_argv_omits_defaults() -> None:
    assert ServeArgs(EngineArgs("m")).to_argv() == ["m"]


@pytest.mark.parametrize("modules", [("-a=/x",), ("a=/x", "--b=/y"), ("--model=x",)])
def test_values_that_begin_with_a_dash_are_not_flags(modules: tuple[str, ...]) -> None:
    args = ServeArgs(EngineArgs("m", enable_lora=True), FrontendArgs(lora_modules=modules))
    assert ServeArgs.from_argv(args.to_argv()) == args


def test_chat_template_starting_with_a_dash_is_not_a_flag() -> None:
    args = ServeArgs(EngineArgs("m"), FrontendArgs(chat_template="-- {{ x }}"))
    assert ServeArgs.from_argv(args.to_argv()) == args


@pytest.mark.parametrize(("text", "value"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500)])
def test_sizes_accept_decimal_and_binary_suffixes(text: str, value: int) -> None:
    assert ServeArgs.from_argv(["m", "--max-model-len", text]).engine.max_model_len == value


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        (["m", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["m", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["m", "--kv-cache-dtype", "int3"], "--kv-cache-dtype"),
        (["m", "--port", "70000"], "--port"),
        (["m", "--gpu-memory-utilization", "0"], "--gpu-memory-utilization"),
        (["m", "--max-model-len", "1.0001k"], "--max-model-len"),
        (["m", "--long-prefill-token-threshold=-1"], "--long-prefill-token-threshold"),
        (["m", "--long-prefill-token-threshold=64", "--no-enable-chunked-prefill"], "--long-prefill-token-threshold"),
        (["m", "--max-itl-ms=0"], "--max-itl-ms"),
        (["m", "--max-itl-ms=-3"], "--max-itl-ms"),
        (["m", "--max-itl-ms=nan"], "--max-itl-ms"),
        (["m", "--max-itl-ms=inf"], "--max-itl-ms"),
        (["m", "--max-itl-ms=50", "--no-enable-chunked-prefill"], "--max-itl-ms"),
    ],
)
def test_bad_values_are_refused_by_name(words: list[str], argument: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        ServeArgs.from_argv(words)
    assert refused.value.argument == argument


@pytest.mark.parametrize("words", [[], ["m", "--no-such-flag"], ["m", "--max-num", "3"], ["m", "extra"]])
def test_unknown_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(ArgumentError):
        ServeArgs.from_argv(words)


def test_offline_prefill_is_unlimited_unless_a_limit_is_set() -> None:
    assert EngineArgs("m").long_prefill_token_threshold is None
    assert EngineArgs("m").offline() == EngineArgs("m", long_prefill_token_threshold=0)
    for args in (EngineArgs("m", long_prefill_token_threshold=500), EngineArgs("m", max_itl_ms=50)):
        assert args.offline() == args
