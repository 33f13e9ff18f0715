"""NaN and infinity in every flag and every request field that takes a float."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from stoker_common.errors import ArgumentError, RequestError
from stoker_engine.cli.bench.latency import LatencyArgs
from stoker_engine.cli.bench.serving import BenchServeArgs
from stoker_engine.cli.bench.throughput import ThroughputArgs
from stoker_engine.cli.build_kernels import BuildKernelsArgs
from stoker_engine.cli.chat import ChatArgs
from stoker_engine.cli.quantize import QuantizeArgs
from stoker_engine.cli.run_batch import BatchArgs
from stoker_engine.contract import argv
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.core.sampling_params import BeamSearchParams, SamplingParams
from stoker_engine.server.anthropic.request import MessagesRequest
from stoker_engine.server.openai.chat_request import ChatCompletionRequest
from stoker_engine.server.openai.completion_request import CompletionRequest
from stoker_engine.server.responses.request import ResponsesRequest

EVERY: tuple[type[Any], ...] = (
    EngineArgs, FrontendArgs, ChatArgs, QuantizeArgs, BatchArgs, BuildKernelsArgs, LatencyArgs, BenchServeArgs,
    ThroughputArgs,
)  # fmt: skip
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
REQUESTS: dict[type[pydantic.BaseModel], dict[str, Any]] = {
    ChatCompletionRequest: CHAT,
    CompletionRequest: {"model": "m", "prompt": "a"},
    MessagesRequest: CHAT,
    ResponsesRequest: {"model": "m", "input": "a"},
}
#: Each message states the fault, or the permitted range.
SAYS = r"finite|at most|below 1|must be -?\d+ to -?\d+"


def floats(cls: type[Any]) -> Iterator[dataclasses.Field[Any]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if hint is float or (isinstance(hint, types.UnionType) and float in typing.get_args(hint)):
            yield field


def test_float_fields_are_found() -> None:
    assert {"max_itl_ms", "gpu_memory_utilization"} <= {field.name for field in floats(EngineArgs)}


@pytest.mark.parametrize(
    ("cls", "field"),
    [pytest.param(cls, each, id=f"{cls.__name__} {each.name}") for cls in EVERY for each in floats(cls)],
)
@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e999", "-1e999", "x", ""])
def test_flags_refuse_nan_and_infinity(cls: type[Any], field: dataclasses.Field[Any], text: str) -> None:
    parser = argv.Parser()
    argv.add_arguments(parser, cls, "all")
    positional = ["x" for each in dataclasses.fields(cls) if each.metadata.get("positional")]
    flag = argv.flag_name(field.name)
    infinite = text.lstrip("-") in ("inf", "1e999")
    if infinite and field.metadata.get("infinite"):
        assert math.isinf(getattr(parser.parse_args([*positional, f"{flag}={text}"]), field.name))
        return
    with pytest.raises(ArgumentError) as refused:
        parser.parse_args([*positional, f"{flag}={text}"])
    assert str(refused.value) == f"{flag}: {text!r} is not a {'finite ' if infinite else ''}number"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("cls", [EngineArgs, FrontendArgs, BenchServeArgs, SamplingParams, BeamSearchParams])
def test_float_fields_refuse_nan_and_infinity_with_their_range(cls: type[Any], value: float) -> None:
    required: dict[type[Any], dict[str, Any]] = {EngineArgs: {"model": "m"}, BeamSearchParams: {"beam_width": 2}}
    for field in floats(cls):
        if field.metadata.get("infinite"):
            continue
        with pytest.raises((ArgumentError, RequestError), match=SAYS):
            cls(**required.get(cls, {}), **{field.name: value})


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("request_class", REQUESTS)
def test_request_fields_refuse_infinity(request_class: type[pydantic.BaseModel], value: float) -> None:
    """JSON permits ``1e999``, which is parsed as infinite."""
    for name, field in request_class.model_fields.items():
        if float not in typing.get_args(field.annotation) or name == "length_penalty":  # used by beams, as above
            continue
        with pytest.raises((pydantic.ValidationError, RequestError), match=SAYS):
            parsed = request_class.model_validate(REQUESTS[request_class] | {name: value})
            SamplingParams(**{name: getattr(parsed, name)})
