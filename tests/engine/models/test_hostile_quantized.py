"""Quantized checkpoints are untrusted or damaged: each either loads, or is refused with a message.

Every format is damaged in its config.json, in each of its tensors, and randomly in several places at once.
"""

from __future__ import annotations

import math
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.engine import Engine

from ...support.engine.tiny_models import save_tokenizer
from .quantized_folders import FORMATS, Folder, folder

#: A module's tensors that may be absent, or that are not used.
OPTIONAL = ("g_idx", "weight_format", "input_scale", "weight_shape", "weight_zero_point", "quant_map")
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, -5, 3, 5, 7, 128, 10**9, 10**30, 0.5, -0.5, float("nan"), float("inf")),
    *("", "x", "128", "marlin", "a" * 10_000, [], [None], ["x"], [[]], {}, {"x": 1}, {"+:(": {}}, ["re:("]),
    *([0, 0], [-1, 128], [10**9, 10**9], {"bits": 5}, {"group_0": None}, {"group_0": {"targets": 5}}),
]
MODULE = "model.layers.0.mlp.up_proj"

Load = Callable[[Folder], str | None]


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """No damage may cause an allocation of gigabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "memory grew by a GiB"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return the error of a checkpoint; None if it loads."""

    def read(checkpoint: Folder) -> str | None:
        path = checkpoint.write(tmp_path)
        try:
            Engine.from_args(EngineArgs(str(path), num_gpu_blocks_override=8, max_num_batched_tokens=64))
        except (ArgumentError, ModelError) as error:
            assert 20 < len(str(error)) < 3000 and "\n" not in str(error), "not a message of one line"
            return str(error)
        return None

    return read


@pytest.mark.parametrize("name", FORMATS)
def test_undamaged_checkpoints_load(load: Load, name: str) -> None:
    assert load(folder(name)) is None


@pytest.mark.parametrize("name", FORMATS)
def test_odd_config_fields_load_or_are_refused(load: Load, name: str) -> None:
    rng = random.Random(name)
    for path in _paths(folder(name).quantization):
        for value in rng.sample(ODD, 3):
            checkpoint = folder(name)
            _set(checkpoint.quantization, path, value)
            load(checkpoint)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [5, 0, -5, 10**9, "128x", [], 0.5])
def test_unsupported_bits_and_group_sizes_are_refused(load: Load, name: str, value: Any) -> None:
    for path in _paths(folder(name).quantization):
        if path[-1] in ("bits", "num_bits", "weight_block_size", "bnb_4bit_quant_type") or path[-1:] == _group(name):
            checkpoint = folder(name)
            harmless = (path[-1] == "weight_block_size" and value == []) or (name == "int-quantized" and value == 5)
            if not harmless:
                _set(checkpoint.quantization, path, value)
                assert load(checkpoint) is not None, f"{path[-1]} {value!r}"


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_tensors_without_a_config_are_refused(load: Load, name: str) -> None:
    checkpoint = folder(name)
    checkpoint.quantization = None
    assert load(checkpoint) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_configs_of_other_formats_load_or_are_refused(load: Load, name: str) -> None:
    for other in FORMATS:
        checkpoint = folder(name)
        checkpoint.quantization = folder(other).quantization
        load(checkpoint)


@pytest.mark.parametrize("value", [5, [], "gptq", {}, {"quant_method": 5}, {"quant_method": "x"}, {"bits": 4}])
def test_malformed_quantization_configs_are_refused(load: Load, value: Any) -> None:
    checkpoint = folder("gptq")
    checkpoint.quantization = value
    assert load(checkpoint) is not None


@pytest.mark.parametrize("pattern", ["((a+)b?)+x", "(a|a)+x", "(.*)*x", ".*" * 50, "(" * 500, "a{1,60000}{1,60000}"])
def test_expensive_patterns_are_refused(load: Load, pattern: str) -> None:
    checkpoint = folder("pack-quantized")
    assert checkpoint.quantization is not None
    checkpoint.quantization["ignore"] = [f"re:{pattern}"]
    checkpoint.tensors["a" * 200 + ".weight"] = torch.zeros(1)
    assert load(checkpoint) is not None


@pytest.mark.parametrize("name", FORMATS)
def test_missing_tensors_are_refused_by_name(load: Load, name: str) -> None:
    for component in _components(name):
        checkpoint = folder(name)
        del checkpoint.tensors[f"{MODULE}.{component}"]
        message = load(checkpoint)
        if not component.endswith((*OPTIONAL, "qzeros") if name == "gptq" else OPTIONAL):
            # Without codes, the module counts as unquantized, and its weight is missing.
            assert message is not None and (MODULE in message or "layers.0.up" in message), f"{component}: {message}"


@pytest.mark.parametrize("name", FORMATS)
def test_misshapen_tensors_are_refused_by_name(load: Load, name: str) -> None:
    for component in _components(name):
        tensor = folder(name).tensors[f"{MODULE}.{component}"]
        for what, other in _other_shapes(tensor).items():
            checkpoint = folder(name)
            checkpoint.tensors[f"{MODULE}.{component}"] = other
            message = load(checkpoint)
            is_of_all = name == "fp8 blocks" and other.numel() == 1  # a scale of a whole matrix
            if not (component.endswith((*OPTIONAL, "nf4")) or is_of_all) and other.numel() != tensor.numel():
                assert message is not None and MODULE in message, f"{component}, {what}: {message}"


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_of_other_dtypes_load_or_are_refused(load: Load, name: str) -> None:
    for component in _components(name):
        key = f"{MODULE}.{component}"
        for dtype in (torch.bool, torch.int64, torch.float64, torch.complex64, torch.float8_e5m2):
            checkpoint = folder(name)
            checkpoint.tensors[key] = checkpoint.tensors[key].to(dtype)
            message = load(checkpoint)
            if component in ("qweight", "weight_packed", "qzeros"):
                assert message is not None and MODULE in message, f"{component} as {dtype}: {message}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_scales_are_refused(load: Load, name: str, value: float) -> None:
    """One element of a tensor is changed; in types of one byte it becomes NaN."""
    for component in _components(name):
        tensor = folder(name).tensors[f"{MODULE}.{component}"]
        is_e8m0 = name == "mxfp4" and component == "weight_scale"
        if component.endswith(OPTIONAL) or not (tensor.is_floating_point() or is_e8m0):
            continue
        checkpoint = folder(name)
        damaged = checkpoint.tensors[f"{MODULE}.{component}"]
        flat = damaged.view(torch.uint8).flatten() if damaged.element_size() == 1 else damaged.view(-1)
        flat[len(flat) // 2] = (255 if is_e8m0 else 0x7F) if damaged.element_size() == 1 else value
        message = load(checkpoint)
        assert message is not None and MODULE in message, f"{component}: {message}"


@pytest.mark.parametrize("value", [-1, 4, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize(
    ("name", "component"), [("gptq", "g_idx"), ("gptq 3 bits", "g_idx"), ("pack-quantized order", "weight_g_idx")]
)
def test_nonexistent_groups_are_refused(load: Load, name: str, component: str, value: int) -> None:
    checkpoint = folder(name)
    checkpoint.tensors[f"{MODULE}.{component}"][7] = value
    message = load(checkpoint)
    assert message is not None and MODULE in message


@pytest.mark.parametrize("value", [[0, 0], [-1, 128], [10**12, 10**12], [256, 64], [256], [2**62, 4]])
def test_wrong_weight_shapes_are_refused(load: Load, value: list[int]) -> None:
    checkpoint = folder("pack-quantized")
    checkpoint.tensors[f"{MODULE}.weight_shape"] = torch.tensor(value)
    message = load(checkpoint)
    assert message is not None and MODULE in message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"[" * 10_000,
        b"{}",
        b"5",
        b'{"quant_type": "nf4", "blocksize": 0, "dtype": "bfloat16", "shape": [256, 128]}',
        b'{"quant_type": "nf4", "blocksize": -64, "dtype": "bfloat16", "shape": [256, 128]}',
        b'{"quant_type": "nf4", "blocksize": 1000000000, "dtype": "bfloat16", "shape": [256, 128]}',
        b'{"quant_type": "nf4", "blocksize": "64", "dtype": "bfloat16", "shape": [1000000000, 1000000000]}',
        b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [-256, -128]}',
        b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": "x"}',
        b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, 256, 1]}',
    ],
)
def test_malformed_bitsandbytes_states_are_refused(load: Load, text: bytes) -> None:
    checkpoint = folder("bitsandbytes nf4")
    key = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
    checkpoint.tensors[key] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()
    assert load(checkpoint) is not None


@pytest.mark.parametrize("seed", range(3))
def test_checkpoints_damaged_in_several_places_load_or_are_refused(load: Load, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        checkpoint = folder(name := rng.choice(list(FORMATS)))
        for _ in range(rng.randint(1, 3)):
            _damage(checkpoint, name, rng)
        load(checkpoint)


def test_serve_exits_with_a_message(tmp_path: Path) -> None:
    checkpoint = folder("gptq")
    checkpoint.tensors[f"{MODULE}.scales"].fill_(math.nan)
    path = checkpoint.write(tmp_path)
    save_tokenizer(path)
    run = "import sys; from stoker_engine.cli.serve import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", run, str(path), "--port=0", "--num-gpu-blocks-override=8"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr and MODULE in ended.stderr


def _group(name: str) -> tuple[str, ...]:
    """Return the names of the group size's field, if the format has groups."""
    return () if name in ("int-quantized", "float-quantized") else ("group_size",)


def _components(name: str) -> list[str]:
    """Return a module's tensors, by the ends of their names."""
    return [each.removeprefix(f"{MODULE}.") for each in folder(name).tensors if each.startswith(f"{MODULE}.")]


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each field of nested dictionaries."""
    if isinstance(value, dict):
        for key, element in value.items():
            yield (*above, key)
            yield from _paths(element, (*above, key))


def _set(config: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def _other_shapes(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    flat = tensor.flatten()
    found = {
        "one element": flat[:1],
        "no dimension": flat[0],
        "no element": flat[:0],
        "flat": flat,
        "a stack": tensor[None],
    }
    if tensor.dim():
        found |= {"half": tensor[: len(tensor) // 2], "twice": torch.cat([tensor, tensor])}
    if tensor.dim() == 2:
        found |= {
            "transposed": tensor.T,
            "narrow": tensor[:, : tensor.shape[1] // 2],
            "a row more": _with_another_row(tensor),
        }
    return found


def _with_another_row(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]])


def _damage(checkpoint: Folder, name: str, rng: random.Random) -> None:
    """Damage the checkpoint in one place."""
    key = rng.choice([each for each in checkpoint.tensors if ".layers." in each])
    match rng.choice(["config", "missing", "renamed", "shape", "dtype", "bytes"]):
        case "config":
            path = rng.choice(list(_paths(folder(name).quantization)))
            try:
                _set(checkpoint.quantization, path, rng.choice(ODD))
            except (KeyError, TypeError, IndexError):
                return  # a parent field is already damaged
        case "missing":
            del checkpoint.tensors[key]
        case "renamed":
            checkpoint.tensors[rng.choice([key + "x", "x" + key, key.replace("0", "9")])] = checkpoint.tensors.pop(key)
        case "shape":
            checkpoint.tensors[key] = rng.choice(list(_other_shapes(checkpoint.tensors[key]).values()))
        case "dtype":
            dtypes = [torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn]
            checkpoint.tensors[key] = checkpoint.tensors[key].to(rng.choice(dtypes))
        case "bytes":
            flat = checkpoint.tensors[key].contiguous().flatten().view(torch.uint8)
            if len(flat):
                flat[rng.randrange(len(flat)) :][:8] = rng.choice([0, 127, 128, 255])
            shape = checkpoint.tensors[key].shape
            checkpoint.tensors[key] = flat.view(checkpoint.tensors[key].dtype).view(shape)
