"""The CPU's kernels under sanitizers: the fuzz tests in a process that ends on a stray read or undefined behaviour; and
the thread pool and the ranks' shared memory under ThreadSanitizer.

AddressSanitizer puts red zones around every allocation of the process, including torch's tensors.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stoker_engine.kernels.cpu.build import SOURCES
from stoker_engine.kernels.cpu.isa import usable_isas

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(600)  # compiling takes most of it

HAS_AMX = any(isa.name == "amx" for isa in usable_isas())

_ADDRESS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"


@functools.cache
def _runtime(name: str) -> str:
    """Return a sanitizer's library; skip if the compiler has none."""
    try:
        found = subprocess.run(
            ["g++", f"-print-file-name={name}.so"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found = name
    if not Path(found).is_absolute():
        pytest.skip(f"g++ has no {name} here")
    return found


_BUILD = """
import sys
from stoker_engine.contract.cache_folder import cache_folder
from stoker_engine.kernels.cpu.build import build
from stoker_engine.kernels.cpu.isa import usable_isas
build(next(level for level in usable_isas() if level.name == sys.argv[1]), cache_folder() / "native")
"""


def _build(isa: str, flags: str, environment: dict[str, str]) -> None:
    """Compile the kernels in a process without sanitizer, which would double the compiler's time."""
    environment = {**os.environ, "STOKER_NATIVE_CXXFLAGS": flags, **environment}
    subprocess.run([sys.executable, "-c", _BUILD, isa], env=environment, check=True)


def _sanitized(isa: str, *command: str, flags: str = _ADDRESS, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with kernels built for AddressSanitizer and UndefinedBehaviorSanitizer, and memory watched by both."""
    _build(isa, flags, environment)
    environment = {
        **os.environ,
        "LD_PRELOAD": _runtime("libasan"),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python frees little when it ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "STOKER_NATIVE_CXXFLAGS": flags,
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    "isa, examples",
    [
        pytest.param(isa.name, "10", id=isa.name, marks=[pytest.mark.slow(drawn=False)] * (n > 0))
        for n, isa in enumerate(usable_isas())
    ],
)
def test_fuzz_tests_pass_under_sanitizers(isa: str, examples: str) -> None:
    arguments = ("-q", "-x", "-k", f"[{isa}]", "-p", "no:cacheprovider", str(HERE / "test_fuzz.py"))
    done = _sanitized(isa, "-m", "pytest", *arguments, STOKER_FUZZ_EXAMPLES=examples)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


_BITS = """
import sys
import torch
from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat
from stoker_engine.kernels.cpu.block_panels import block_panels
from stoker_engine.kernels.cpu.isa import usable_isas
from stoker_engine.kernels.cpu.library import load
from stoker_engine.kernels.cpu.linear import linear
from stoker_engine.kernels.cpu.panels import panels
from tests.support.engine.gguf_random import random_blocks
from tests.engine.kernels.group_random import random_groups

IN_GROUPS = GroupFormat("uint8", 64, "float16", zero=True)
kernels = load(next(level for level in usable_isas() if level.name == sys.argv[1]))
of_numbers, of_blocks, results = panels(kernels), block_panels(kernels), []
for seed in range(12):
    generator = torch.Generator().manual_seed(seed)
    rows, outputs, inner = 1 + seed * 7, 16 * (1 + seed % 3), 64 * (1 + seed)
    spread = torch.randn(rows, inner, generator=generator) * 30 * (seed % 3)
    x = (torch.randn(rows, inner, generator=generator) * spread.exp2()).bfloat16()  # subnormal and infinite values, too
    weight = torch.randn(outputs, inner, generator=generator).bfloat16()
    if seed == 5:
        x[3, 7], x[4, 60], weight[2, 11] = torch.nan, torch.inf, 1e-39
    results.append(linear(kernels, weight)(x))
    of_numbers.pack(weight)
    results.append(of_numbers.linear(weight)(x))
    for stored, matrix in (
        (GGUF_FORMATS["Q4_1"], random_blocks(GGUF_FORMATS["Q4_1"], outputs, inner // 32, seed)),
        (IN_GROUPS, random_groups(IN_GROUPS, outputs, inner, seed).blocks),
    ):
        of_blocks.pack(matrix, stored, inner)
        results.append(of_blocks.linear(matrix, stored, inner, torch.bfloat16)(x))
if hasattr(kernels, "amx_model_products"):
    assert kernels.amx_model_products() > 0, "the tile instructions were not used"
torch.save(results, sys.argv[2])
"""


@pytest.mark.slow(drawn=not HAS_AMX)
@pytest.mark.timeout(900)
def test_amx_kernels_with_emulated_tiles_are_right(tmp_path: Path) -> None:
    """Test the AMX ISA on other processors, with its tiles emulated in plain C++.

    On processors with tiles, `test_fuzz` uses these, and the emulation must give the same bits.
    """
    isa = next((isa.name for isa in usable_isas() if isa.name == "avx512-bf16"), None)
    if isa is None:
        pytest.skip("the other instructions of the AMX ISA need AVX512-BF16")
    flags = f"-D__AMX_BF16__ -include {HERE / 'amx_model.h'}"
    environment = {"PYTHONPATH": str(HERE.parents[2])}
    apart = {"STOKER_CACHE": str(tmp_path)}  # a library's name does not depend on the model's text
    if not HAS_AMX:
        drawn = "linear or panels or gguf_blocks or group_blocks or experts or attention"
        files = (str(HERE / "amx_cases.py"), str(HERE / "test_fuzz.py"))
        arguments = ("-q", "-x", "-p", "no:cacheprovider", "-k", f"amx_cases or ([{isa}] and ({drawn}))", *files)
        environment |= apart | {"STOKER_FUZZ_EXAMPLES": "4"}
        done = _sanitized(isa, "-m", "pytest", *arguments, flags=f"{_ADDRESS} {flags}", **environment)
        assert done.returncode == 0, done.stdout[-6000:]
        assert " passed" in done.stdout
        return

    of_model, of_processor = tmp_path / "model.pt", tmp_path / "processor.pt"
    modelled = apart | {"STOKER_NATIVE_CXXFLAGS": f"-O1 {flags}"}
    for name, file, settings in ((isa, of_model, modelled), ("amx", of_processor, {})):
        subprocess.run(
            [sys.executable, "-c", _BITS, name, str(file)], env=os.environ | environment | settings, check=True
        )
    for got, expected in zip(torch.load(of_model), torch.load(of_processor), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


_STRAY = """
import torch
from stoker_engine.kernels.cpu.isa import usable_isas
from stoker_engine.kernels.cpu.library import load
kernels, x = load(usable_isas()[0]), torch.ones(3, 21)
out, largest = torch.empty(3, dtype=torch.int64), torch.empty(3)
kernels.stoker_argmax(0, x.data_ptr(), 21, out.data_ptr(), largest.data_ptr(), 3, 21)
print("all is well", flush=True)
kernels.stoker_argmax(0, x.data_ptr(), 21, out.data_ptr(), largest.data_ptr(), 3, 22)
print("and still")
"""


def test_stray_read_is_detected() -> None:
    done = _sanitized(usable_isas()[0].name, "-c", _STRAY)
    assert "all is well" in done.stdout, done.stdout[-6000:]
    assert "heap-buffer-overflow" in done.stdout and "stoker_argmax" in done.stdout
    assert "and still" not in done.stdout


def test_communicators_pass_under_sanitizers() -> None:
    test = (
        f"{HERE.parent / 'parallel' / 'test_shm_communicator.py'}::test_sequences_of_operations_equal_torch[spinning-3]"
    )
    arguments = ("-q", "-x", "-p", "no:cacheprovider", test)
    done = _sanitized(usable_isas()[0].name, "-m", "pytest", *arguments, STOKER_FUZZ_EXAMPLES="25")
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("broken", [False, True], ids=["unchanged", "with a race"])
@pytest.mark.parametrize(
    "driver, driven, expected_output",
    [
        ("drive_thread_pool.cpp", "common/threads.cpp", "every piece was computed once\n"),
        ("drive_shm_collectives.cpp", "comm/shm_collectives.cpp", "every result was right\n"),
    ],
)
def test_threads_have_no_data_races(
    tmp_path: Path, driver: str, driven: str, expected_output: str, broken: bool
) -> None:
    """Concurrent callers of a pool that grows and shrinks; ranks with shared memory; and that races are detected."""
    _runtime("libtsan")
    program = tmp_path / "threads"
    sources = (str(HERE / driver), str(SOURCES / driven))
    flags = ("-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-pthread", f"-I{SOURCES}", *["-DRACE"] * broken)
    subprocess.run(["g++", *flags, "-o", str(program), *sources], check=True)
    # ThreadSanitizer's shadow memory needs fixed addresses, which random ones may occupy.
    done = subprocess.run(["setarch", "-R", str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if broken:
        assert done.returncode != 0 and "data race" in done.stdout, done.stdout[-6000:]
    else:
        assert done.returncode == 0, done.stdout[-6000:]
        assert done.stdout == expected_output
