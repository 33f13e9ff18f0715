"""Arm's kernels on other processors: cross-compiled, and run by qemu's user mode.

Only the kernels are emulated. Tests run in an ordinary process (`emulated/on_arm.py` is the plugin that connects both),
so that reference results are computed natively. `make emulator` installs the requirements.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_engine.contract.cache_folder import cache_folder
from stoker_engine.kernels.cpu.build import build
from stoker_engine.kernels.cpu.isa import _ISAS

HERE = Path(__file__).parent
PARTS = HERE / "emulated"
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64-static"

pytestmark = [
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(QEMU)), reason="`make emulator` has not been run"),
    pytest.mark.skipif(not shutil.which("gcc"), reason="the heap needs a C compiler"),
]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment for `on_arm`."""
    folder = tmp_path_factory.mktemp("arm")
    guest, heap = folder / "guest", folder / "heap.so"
    subprocess.run([COMPILER, "-std=c++17", "-O2", "-o", guest, PARTS / "guest.cpp", "-ldl"], check=True)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", heap, PARTS / "heap.c"], check=True)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CXX", COMPILER)
        library = build(_ISAS["aarch64"][0], cache_folder() / "native")
    return {
        **os.environ,
        "LD_PRELOAD": str(heap),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(PARTS),
        "STOKER_GUEST": str(guest),
        "STOKER_GUEST_LIBRARY": str(library),
    }


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([HERE / "test_fuzz.py"], id="fuzz"),
        pytest.param([HERE / "test_cpu.py", "-k", "[neon"], id="kernels alone and in batches"),
        pytest.param(
            [
                HERE.parent / "models" / "test_whole_layers.py",
                "-k",
                "test_whole_layers_have_the_bits_of_separate_operations[",
            ],
            id="whole layers",
        ),
    ],
)
def test_arm_kernels_pass_their_tests(arm: dict[str, str], chosen: list[Path | str]) -> None:
    done = _pytest(arm, "--slow", "none", *chosen)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


_STRAY = """
import torch
from stoker_engine.kernels.cpu.library import library

def test_argmax():
    x, out, largest = torch.tensor([[1.0, 3.0, 2.0]]), torch.empty(1, dtype=torch.int64), torch.empty(1)
    def argmax(address):
        library().stoker_argmax(0, address, 3, out.data_ptr(), largest.data_ptr(), 1, 3)
    argmax(x.data_ptr())
    assert (out.item(), largest.item()) == (1, 3.0)
    argmax(4096)
"""


def test_stray_read_ends_the_emulator(arm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_stray.py").write_text(_STRAY)
    done = _pytest(arm, tmp_path / "test_stray.py")
    assert done.returncode == 1
    assert "stoker_argmax found that the process that emulates has ended: -11" in done.stdout, done.stdout[-6000:]


def _pytest(environment: dict[str, str], *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "on_arm"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env={"STOKER_FUZZ_EXAMPLES": "6", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
