"""The CPU's kernels, compared with the torch operations that define them, and rows alone with rows in batches."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker_engine.architectures.stored_formats import GGUF_FORMATS
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.cpu import build, library
from stoker_engine.kernels.cpu.bundle import cpu_kernels
from stoker_engine.kernels.cpu.isa import Isa, isas
from stoker_engine.kernels.cpu.library import load
from stoker_engine.kernels.cpu.linear import linear
from stoker_engine.kernels.cpu.matrix import CpuLinear
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.select import select_kernels

from ...support.engine.gguf_random import random_blocks
from .each_isa import each_isa

DTYPES = (torch.float32, torch.bfloat16)
EXACT = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2}

#: An operation on rows, by either set of kernels.
By = Callable[[Kernels, torch.Tensor], torch.Tensor]


@pytest.fixture(params=each_isa())
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Kernels of one ISA; those other than this processor's widest need another compilation."""
    return load(request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal random values; the seed is the shape."""
    generator = torch.Generator().manual_seed(sum(n * 31**i for i, n in enumerate(shape)))
    return torch.randn(*shape, generator=generator).to(dtype)


def check(kernels: ctypes.CDLL, operation: By, x: torch.Tensor) -> None:
    """Assert that `operation` on the rows of `x` is close to torch's result, and gives each row alone the same bits."""
    native = cpu_kernels(kernels)
    expected = operation(REFERENCE, x)
    got = operation(native, x)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    scale = expected.double().abs().max()
    assert (got.double() - expected.double()).abs().max() / scale < EXACT[x.dtype]
    for start, end in ((0, 1), (len(x) - 1, len(x)), (len(x) // 3, len(x) // 2 + 1)):
        assert torch.equal(operation(native, x[start:end]), got[start:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner,outputs", [(64, 48), (32, 16), (576, 100), (33, 17), (5, 3), (96, 15)])
@pytest.mark.parametrize("rows", [1, 3, 16, 37, 150])
def test_linear_equals_torch(kernels: ctypes.CDLL, rows: int, inner: int, outputs: int, dtype: torch.dtype) -> None:
    weight, bias = random(outputs, inner, dtype=dtype), random(outputs, dtype=dtype)
    wide = random(rows, 2 * inner, dtype=dtype)
    for x in (wide[:, :inner], wide[:, inner:]):  # rows of a wider tensor
        check(kernels, lambda by, rows: by.linear(weight, bias)(rows), x)
        check(kernels, lambda by, rows: by.linear(weight)(rows), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_concat_linear_has_the_bits_of_separate_calls(kernels: ctypes.CDLL, rows: int, dtype: torch.dtype) -> None:
    """The parts have weights in different formats, with and without bias."""
    inner, native = 64, cpu_kernels(kernels)
    blocks = [random_blocks(GGUF_FORMATS[name], outputs, 2, seed=1) for name, outputs in (("Q8_0", 33), ("Q4_0", 5))]
    linears = [
        native.linear(random(17, inner, dtype=dtype), random(17, dtype=dtype)),
        native.quant_linear(blocks[0], GGUF_FORMATS["Q8_0"], inner, dtype),
        native.quant_linear(blocks[1], GGUF_FORMATS["Q4_0"], inner, dtype, random(5, dtype=dtype)),
    ]
    if native.panels is not None and dtype == torch.bfloat16:
        weight = random(48, inner, dtype=dtype)
        native.panels.pack(weight)
        linears.append(native.panels.linear(weight))
    x = random(rows, inner + 3, dtype=dtype)[:, 3:]
    together = native.concat_linear(linears)
    assert isinstance(together, CpuLinear)
    assert torch.equal(together(x), torch.cat([linear(x) for linear in linears], dim=1))
    nested = native.concat_linear([linears[0], together])  # parts that consist of several parts
    assert torch.equal(nested(x), torch.cat([linears[0](x), together(x)], dim=1))


def test_linear_rounds_sums_once(kernels: ctypes.CDLL) -> None:
    """In bfloat16, sums are float32 and rounded once: within half a unit in the last place of the exact result."""
    x, weight = random(20, 512, dtype=torch.bfloat16), random(64, 512, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().T
    error = (linear(kernels, weight, None)(x).double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-4).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("shape", [(40, 576), (9, 20), (70, 1000)])
def test_rms_norm_equals_torch(
    kernels: ctypes.CDLL, shape: tuple[int, int], wide_weight: bool, dtype: torch.dtype
) -> None:
    weight = random(shape[1], dtype=torch.float32 if wide_weight else dtype)
    check(kernels, lambda by, x: by.rms_norm(weight, 1e-5)(x), random(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_heads_equals_torch(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    weight = random(64, dtype=dtype)
    heads = random(30, 8, 64, dtype=dtype)[:, 2:5]
    check(kernels, lambda by, x: by.rms_norm(weight, 1e-6)(x), heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 20, 32])
def test_rotary_equals_torch(kernels: ctypes.CDLL, pairs: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = random(50, 6, 64, dtype=dtype)[:, 1:5]
    positions = torch.arange(50) * 7

    def operation(by: Kernels, x: torch.Tensor) -> torch.Tensor:
        frequencies = 10000.0 ** -(torch.arange(pairs) / pairs)
        first = next(i for i in range(50) if torch.equal(x[0], rows[i]))
        cos, sin = by.cos_sin(positions[first : first + len(x)], frequencies, 1.25, dtype)
        return by.apply_rotary(x, cos, sin, interleaved)

    rows = x
    check(kernels, operation, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("size", [128, 1000, 7])
def test_activations_equal_torch(kernels: ctypes.CDLL, size: int, name: str, dtype: torch.dtype) -> None:
    x = random(33, 2 * size, dtype=dtype) * 3
    check(kernels, lambda by, x: by.activation(name)(x), x)
    check(kernels, lambda by, x: by.act_and_mul(name)(x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 16, 1000, 50_001])
def test_argmax_returns_the_first_maximum(kernels: ctypes.CDLL, size: int, dtype: torch.dtype) -> None:
    argmax = cpu_kernels(kernels).argmax
    x = random(9, size, dtype=dtype)
    x[3, size // 2 :] = x[3].max() + 1  # equal values: the first is the maximum
    x[4] = -torch.inf
    x[4, size - 1] = -5.0
    best, largest = argmax(x)
    assert best.tolist() == x.max(dim=-1, keepdim=True).values.eq(x).int().argmax(dim=-1).tolist()
    assert torch.equal(largest, x.amax(dim=-1).float())
    assert argmax(x[:1])[0].tolist() == best.tolist()[:1]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, 50_001])
def test_keep_allowed_masks_forbidden_tokens(kernels: ctypes.CDLL, size: int, native: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    allowed = torch.rand(4, size, generator=generator) < torch.tensor([[0.0], [0.01], [0.5], [1.0]])
    bits = np.packbits(np.pad(allowed.numpy(), ((0, 0), (0, -size % 32))), axis=1, bitorder="little").view(np.int32)
    whole = random(7, size + 3)
    expected = whole.clone()
    rows = torch.tensor([5, 0, 6, 2])
    for row, of_row in zip(rows.tolist(), allowed, strict=True):
        expected[row, :size] = torch.where(of_row, whole[row, :size], -torch.inf)
    keep_allowed = (cpu_kernels(kernels) if native else REFERENCE).keep_allowed
    keep_allowed(whole[:, :size], rows, torch.from_numpy(bits))
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("size", [1, 5, 16, 1000, 50_001])
def test_argmax_reports_nan_and_infinity(kernels: ctypes.CDLL, size: int, native: bool, dtype: torch.dtype) -> None:
    argmax = cpu_kernels(kernels).argmax if native else REFERENCE.argmax
    columns = sorted({0, size // 3, size - 1})
    x = random(4 * len(columns), size).to(dtype)
    for row, column in enumerate(columns):
        x[row, column] = torch.nan
        x[row + len(columns), column] = torch.inf
        x[row + 2 * len(columns)] = -torch.inf
        x[row + 3 * len(columns), column] = -torch.inf
        x[row + 3 * len(columns), column - 1] = 1.0
    finite = argmax(x)[1].isfinite().tolist()
    assert finite == [False] * 3 * len(columns) + [True] * len(columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "atol"), [("silu", 1e-34), ("gelu", 1e-6), ("gelu_pytorch_tanh", 1e-6)])
def test_activations_of_every_bfloat16_equal_float64(
    kernels: ctypes.CDLL, name: str, atol: float, dtype: torch.dtype
) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).to(dtype)
    expected = REFERENCE.activation(name)(x.double())
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    result = cpu_kernels(kernels).activation(name)(x[None])[0].double()
    torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True)


def test_idle_threads_sleep() -> None:
    """The kernels' threads spin for milliseconds after an operation, not longer."""
    script = """
import time, torch
from stoker_engine.kernels.cpu.library import library
from stoker_engine.kernels.cpu.linear import linear
library().stoker_use_threads(4)
linear(library(), torch.ones(512, 512))(torch.ones(64, 512))
time.sleep(0.1)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""
    used = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert float(used) < 0.01


def test_threads_share_work_and_lose_no_piece(kernels: ctypes.CDLL) -> None:
    """With more threads than processors, and two concurrent callers, all pieces are computed and awaited."""
    weight = random(200, 64)
    multiply = linear(kernels, weight, None)
    batches = [random(rows, 64) for rows in (1, 7, 64, 130)]
    kernels.stoker_use_threads(1)
    expected = [multiply(x) for x in batches]
    wrong = []

    def call() -> None:
        for _ in range(300):
            wrong.extend(x.shape for x, y in zip(batches, expected, strict=True) if not torch.equal(multiply(x), y))

    kernels.stoker_use_threads(5)
    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    kernels.stoker_use_threads(1)
    assert not wrong


@pytest.mark.slow(drawn=False)  # image builds compile all of them
@pytest.mark.parametrize("isa", isas(), ids=lambda isa: isa.name)
def test_every_isa_compiles(isa: Isa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes ISAs that this processor cannot run: images are built on any machine."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "empty"))
    made = build.build(isa, tmp_path)
    assert made.is_file() and made.parent == tmp_path
    assert build.build(isa, tmp_path) == made


def test_without_a_compiler_torch_is_used_and_a_warning_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    library.library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert library.library() is None
    assert "no-such-compiler" in caplog.text and "Install g++" in caplog.text
    assert select_kernels(torch.device("cpu"), torch.bfloat16) is REFERENCE
    library.library.cache_clear()


def test_isa_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An untested ISA runs only if it is named; a wrong name is reported with the valid ones."""
    best, last = (Isa(name, (), frozenset()) for name in ("best", "last"))
    untried = Isa("untried", (), frozenset(), tried=False)
    monkeypatch.setattr(library, "load", lambda isa: isa)
    chosen = library.library.__wrapped__
    monkeypatch.delenv("STOKER_NATIVE_KERNELS", raising=False)
    monkeypatch.setattr(library, "usable_isas", lambda: (untried, best, last))
    assert chosen() is best
    for setting, found in [("1", best), ("last", last), ("untried", untried)]:
        monkeypatch.setenv("STOKER_NATIVE_KERNELS", setting)
        assert chosen() is found
    monkeypatch.setattr(library, "usable_isas", lambda: (untried,))
    for setting, message in [("1", "no supported ISA has been tested"), ("mmx", "no supported ISA is called 'mmx'")]:
        monkeypatch.setenv("STOKER_NATIVE_KERNELS", setting)
        caplog.clear()
        assert chosen() is None
        assert message in caplog.text and "STOKER_NATIVE_KERNELS=LEVEL runs one nevertheless: untried" in caplog.text
