"""Adapters, in the forms in which users name them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker_common.errors import ArgumentError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.lora_modules import LoRAModule
from stoker_engine.contract.serve_args import ServeArgs

ENABLED = ["m", "--enable-lora"]


def test_lora_modules_accept_name_path_and_json_and_repeated_flags() -> None:
    of_json = {"name": "c", "path": "/c=d", "base_model_name": "base"}
    words = ["--lora-modules", "a=/a", "org/b=/b=1", "--lora-modules", json.dumps(of_json), "--max-loras=2"]
    args = ServeArgs.from_argv([*ENABLED, *words])
    assert args.frontend.adapters == (
        LoRAModule("a", "/a"),
        LoRAModule("org/b", "/b=1"),
        LoRAModule("c", "/c=d", "base"),
    )
    assert ServeArgs.from_argv(args.to_argv()) == args


@pytest.mark.parametrize(
    "word, message",
    [
        ("a", "neither NAME=PATH nor JSON"),
        ("=/a", "1 to 256 characters"),
        ("a=", "requires the path"),
        (f"{'a' * 257}=/a", "1 to 256 characters"),
        ("a\n=/a", "printable"),
        (" a=/a", "spaces at start and end"),
        ("a,b=/a", "must not contain commas"),
        ("a=/a\0", "requires the path"),
        ('{"name": "a"', "not JSON"),
        ("{" * 100_000, "not JSON"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"name": "a"}', "requires the field path"),
        ('{"name": "a", "path": 1}', "must be a string"),
        ('{"name": null, "path": "b"}', "must be a string"),
        ('{"name": "a", "path": "/a", "base_model_name": []}', "must be a string"),
        ('{"name": "a", "path": "/a", "rank": 8}', "unknown field 'rank'"),
        ("m=/a", "the name of the model"),
    ],
)
def test_malformed_lora_modules_are_refused(word: str, message: str) -> None:
    with pytest.raises(ArgumentError, match="--lora-modules") as caught:
        ServeArgs.from_argv([*ENABLED, f"--lora-modules={word}"])
    assert message in str(caught.value)


def test_duplicate_adapter_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="two adapters have the name 'a'"):
        FrontendArgs(lora_modules=("a=/a", "a=/b"))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"allow_runtime_lora_updating": True, "lora_dir": ("/a",)}, "requires --admin-api-key-file"),
        ({"allow_runtime_lora_updating": True, "admin_api_key_file": "k"}, "requires --lora-dir"),
        ({"lora_config": "c"}, "--lora-config: requires --lora-dir"),
        ({"lora_dir": ("",)}, "--lora-dir: must name a folder"),
    ],
)
def test_lora_flags_are_refused_without_the_flags_they_require(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FrontendArgs(**fields)


@pytest.mark.parametrize(
    "words",
    [
        ["--lora-modules", "a=/a"],
        ["--lora-dir=/a"],
        ["--lora-config=c", "--lora-dir=/a"],
        ["--admin-api-key-file=k"],
        ["--allow-runtime-lora-updating", "--admin-api-key-file=k", "--lora-dir=/a"],
    ],
)
def test_frontend_lora_flags_require_enable_lora(words: list[str]) -> None:
    with pytest.raises(ArgumentError, match="requires --enable-lora"):
        ServeArgs.from_argv(["m", *words])
    args = ServeArgs.from_argv([*ENABLED, *words])
    assert ServeArgs.from_argv(args.to_argv()) == args


@pytest.mark.parametrize(
    "fields",
    [{"max_loras": 3}, {"max_cpu_loras": 30}, {"max_lora_rank": 8}, {"lora_dtype": "float32"},
     {"lora_target_modules": ("q_proj",)}],
    ids=str,
)  # fmt: skip
def test_engine_lora_flags_require_enable_lora(fields: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="requires --enable-lora"):
        EngineArgs("m", **fields)
    assert EngineArgs("m", enable_lora=True, **fields).num_resident_adapters > 0
