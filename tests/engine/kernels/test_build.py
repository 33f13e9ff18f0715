"""Compilation of the CPU's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_engine.kernels.cpu import build
from stoker_engine.kernels.cpu.isa import isas


def test_a_folder_without_sources_is_an_error_and_not_an_empty_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    build.file_name.cache_clear()
    try:
        with pytest.raises(build.BuildError, match="no C\\+\\+ sources"):
            build.build(isas()[0], tmp_path)
    finally:
        build.file_name.cache_clear()


def test_sources_are_found_in_every_folder() -> None:
    folders = {source.parent.name for source in build.SOURCES.rglob("*.cpp")}
    assert {"attention", "gemm", "gguf", "quant", "ops", "layer", "lora", "comm", "common"} == folders


def test_the_command_builds_what_this_processor_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []
    monkeypatch.setattr(build, "build", lambda isa, folder: made.append(isa.name) or folder / f"stoker-{isa.name}.so")
    for choice in ("host", "all"):
        monkeypatch.setattr("sys.argv", ["build", str(tmp_path), "--levels", choice])
        build.main()
    assert made[1:] == [isa.name for isa in isas()]
    assert made[0] in made[1:]
