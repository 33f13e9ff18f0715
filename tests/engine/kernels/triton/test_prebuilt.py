"""Kernels and the driver's module that an image contains."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime import build

from stoker_engine.kernels.prebuilt import VARIABLE, use_prebuilt
from stoker_engine.kernels.triton.compile.driver import build_driver, can_build_driver, use_built_driver


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(knobs.build, "impl", None)
    return tmp_path / "cache"


def test_prebuilt_kernels_are_copied_without_overwriting_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "image"
    for name in ("a", "b"):
        (image / name).mkdir(parents=True)
        (image / name / "kernel.cubin").write_text("the image's")
    (cache / "b").mkdir(parents=True)
    (cache / "b" / "kernel.cubin").write_text("the pod's")
    monkeypatch.setenv(VARIABLE, str(image))
    ranks = [threading.Thread(target=use_prebuilt) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    found = {str(each.relative_to(cache)): each.read_text() for each in cache.rglob("*.cubin")}
    assert found == {"a/kernel.cubin": "the image's", "b/kernel.cubin": "the pod's"}


def test_missing_folder_is_logged(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    use_prebuilt()
    assert f"{VARIABLE}={tmp_path}/gone: No such file or directory; kernels are compiled instead" in caplog.text


@pytest.mark.skipif(not can_build_driver(), reason="needs a C compiler and Python's headers")
def test_prebuilt_driver_is_used_without_a_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia import driver

    built = tmp_path / "built"
    build_driver(built)
    use_built_driver(built)
    monkeypatch.setenv("PATH", "")
    source = Path(driver.__file__).with_name("driver.c")
    arguments = {"name": "cuda_utils", "include_dirs": driver.include_dirs, "libraries": driver.libraries}
    module = build.compile_so_from_file(str(source), **arguments)
    other = tmp_path / "other.c"
    other.write_text("int one;")
    with pytest.raises(RuntimeError, match="C compiler"):
        build.compile_so_from_file(str(other), "other")
    # The module needs libcuda; a library without functions suffices to inspect it.
    library = tmp_path / "libcuda.so.1"
    monkeypatch.undo()
    subprocess.run(["cc", "-shared", "-x", "c", os.devnull, "-o", library], check=True)
    code = (
        "import importlib.util, os, sys\n"
        "sys.setdlopenflags(os.RTLD_LAZY)\n"
        f"spec = importlib.util.spec_from_file_location('cuda_utils', {module!r})\n"
        "found = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(found)\n"
        "found.launch, found.load_binary\n"
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
