"""``stoker build-kernels``: what it writes, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from stoker_engine.cli.build_kernels import main


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "default"))  # the command sets it


@pytest.mark.slow
def test_kernels_are_compiled_once(tiny_llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stoker", "build-kernels", str(tiny_llama), "--target", "sm_90"]
    output = tmp_path / "kernels"

    def build_kernels(*more: str) -> str:  # in its own process: Triton compiles nothing twice in one
        return subprocess.run(
            [*command, "--output", str(output), *more], check=True, capture_output=True, text=True
        ).stderr

    build_kernels()
    assert {"_prefill_attention", "_decode_attention", "_merge_parts", "_argmax", "_keep_allowed", "_sample"} <= {
        each.stem for each in output.rglob("*.cubin")
    }
    assert "sm_90: 0 kernels compiled" in build_kernels()
    assert "sm_90: 0 kernels compiled" not in build_kernels("--batch-invariant")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--target: is required"),
        (["--target", "sm_75"], "'sm_75' is not supported; the targets are sm_80"),
        (["--target", "sm_90", "--tensor-parallel-size", "3"], "--tensor-parallel-size"),
    ],
)
def test_invalid_arguments_are_refused(
    more: list[str], message: str, tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tiny_llama), *more]) == 2
    printed = "".join(capfd.readouterr())
    assert message in printed and "Traceback" not in printed
