"""Arguments that do not fit a model are refused before an engine starts, with the engine's own messages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import ArgumentError, ModelError, StokerError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine
from stoker_engine.models.check_model import check_local_model


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def _edit(model: Path, name: str = "config.json", **changed: Any) -> None:
    file = model / name
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **changed}))


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _only_pickled_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def _a_missing_shard(model: Path) -> None:
    _edit(model, "model.safetensors.index.json", weight_map={"a": "model.safetensors", "b": "missing.safetensors"})


@pytest.mark.parametrize(
    ("arguments", "change", "error", "message"),
    [
        ({"quantization": "int3"}, None, ArgumentError, "--quantization: int3 is requested"),
        ({"quantization": "awq"}, None, ArgumentError, "--quantization: awq is requested"),
        ({"tensor_parallel_size": 3}, None, ArgumentError, "--tensor-parallel-size: tensor 3 does not divide"),
        ({"pipeline_parallel_size": 5}, None, ArgumentError, "--pipeline-parallel-size: .* use at most 2"),
        ({"enable_expert_parallel": True}, None, ArgumentError, "--enable-expert-parallel: .*; leave it out"),
        ({"max_model_len": 1 << 20}, None, ModelError, "--max-model-len 1048576 exceeds"),
        ({"revision": "main"}, None, ArgumentError, "--revision"),
        ({"generation_config": "/no/such"}, None, ArgumentError, "--generation-config"),
        ({}, _no_weights, ModelError, r"no \*.safetensors in"),
        ({}, _only_pickled_weights, ModelError, "pytorch_model.bin can run code"),
        ({}, _a_missing_shard, ModelError, "lacks missing.safetensors"),
        ({}, lambda model: (model / "config.json").unlink(), ModelError, "no config.json"),
        ({}, lambda model: _edit(model, architectures=[]), ModelError, "architectures"),
        ({}, lambda model: _edit(model, architectures=["BertModel"]), ModelError, "BertModel"),
        ({}, lambda model: _edit(model, quantization_config={"quant_method": "eetq"}), ModelError, "'eetq'"),
    ],
)
def test_errors_are_those_of_the_engine(
    model: Path, arguments: dict[str, Any], change: Any, error: type[StokerError], message: str
) -> None:
    if change is not None:
        change(model)
    args = EngineArgs(str(model), device="cpu", num_gpu_blocks_override=64, **arguments)
    with pytest.raises(error, match=message) as early:
        check_local_model(args)
    with pytest.raises(error) as late:
        Engine.from_args(args)
    assert (type(early.value), str(early.value)) == (type(late.value), str(late.value))


@pytest.mark.parametrize("name", ["/no/such/folder", "m", "https://example.com/model", "no/such/model.safetensors/x"])
def test_a_model_that_names_nothing_is_refused_and_hub_ids_are_not_looked_up(name: str) -> None:
    if "://" in name:
        check_local_model(EngineArgs(name))  # reported when the model is located
        return
    with pytest.raises(ModelError, match="neither a local folder"):
        check_local_model(EngineArgs(name))
    check_local_model(EngineArgs("no-such-organization/no-such-model", revision="main"))
    check_local_model(EngineArgs("demo://gemma-3-270m"))


def test_arguments_whose_validity_depends_on_the_device_are_left_to_the_engine(tiny_llama: Path) -> None:
    for arguments in ({}, {"quantization": "int8", "tensor_parallel_size": 3}, {"tensor_parallel_size": 2}):
        check_local_model(EngineArgs(str(tiny_llama), **arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "word"),
    [(1, "--quantization=int3"), (2, "--quantization=int3"), (1, "--tensor-parallel-size=3"), (1, "--max-num-seqs=-1")],
)
def test_the_server_starts_no_process_and_exits_with_2(tiny_llama: Path, count: int, word: str) -> None:
    program = """
import subprocess, sys
from stoker_engine.cli.serve import main
def refuse(*_, **__): raise AssertionError("a process was started")
subprocess.Popen.__init__ = refuse
code = main(sys.argv[1:])
assert not {"torch", "uvicorn"} & sys.modules.keys()
sys.exit(code)
"""
    argv = [sys.executable, "-c", program, str(tiny_llama), "--port=0", f"--api-server-count={count}", word]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert word.partition("=")[0] in done.stderr
    assert "Traceback" not in done.stderr
