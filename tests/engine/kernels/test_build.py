"""Compilation of the CPU's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_engine.kernels.cpu import build
from stoker_engine.kernels.cpu.isa import isas


def test_build_without_sources_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_build_command_builds_the_hosts_isa_or_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[str] = []
    monkeypatch.setattr(build, "build", lambda isa, folder: built.append(isa.name) or folder / f"stoker-{isa.name}.so")
    for choice in ("host", "all"):
        monkeypatch.setattr("sys.argv", ["build", str(tmp_path), "--levels", choice])
        build.main()
    assert built[1:] == [isa.name for isa in isas()]
    assert built[0] in built[1:]
