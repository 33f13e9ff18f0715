"""llama.cpp, built for this CPU from the source in an npm package, and the GGUF files that its converter and quantizer
make of the models.
"""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from machine import cpu_name

from cpu.environments import Step, once, program
from cpu.restrict import folder_name, restriction
from stoker_engine.models.hub.demo import demo_model

PACKAGE = "node-llama-cpp@3.22.1"
VERSION = "0.5.0"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)

_AVX2 = ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")))
_AVX512 = (*_AVX2, "-DGGML_AVX512=ON")
#: llama.cpp's options for each of `RESTRICTIONS`, and without one.
ISA_OPTIONS = {
    None: ("-DGGML_NATIVE=ON",),
    "avx2": _AVX2,
    "avx2-vnni": (*_AVX2, "-DGGML_AVX_VNNI=ON"),
    "avx512": _AVX512,
    "avx512-vnni": (*_AVX512, "-DGGML_AVX512_VNNI=ON"),
}

#: llama.cpp's converter, patched to accept unknown tokenizers such as that of the random models.
CONVERT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion.base import TextModel

TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
convert_hf_to_gguf.main()
"""


def build(cache: Path) -> Path:
    """Return llama.cpp's folder, with programs in ``build/bin``.

    If ``STOKER_NATIVE_KERNELS`` selects an instruction set, llama.cpp is built for it.

    Raises:
        CannotRunError: the build failed, or llama.cpp cannot be built for that instruction set.
    """
    options = (*OPTIONS, *ISA_OPTIONS[restriction()])
    folder = cache / folder_name("llama.cpp")
    return once(folder, f"{PACKAGE} {' '.join(options)} for {cpu_name()}", partial(_install, options))


def gguf_file(shape: str, weights: str, folder: Path, cache: Path) -> Path:
    """Return the GGUF file of the model in a Hugging Face `folder`.

    Args:
        weights: format by llama.cpp's name (``bf16``, ``q8_0``, ``q4_k_m``).

    Raises:
        CannotRunError: llama.cpp cannot be built, or cannot convert the model.
    """
    if (shape, weights) == ("gemma", "q4_k_m"):  # the demo model's own file
        return demo_model("gemma-3-270m")
    home = build(cache)

    def make(target: Path, step: Step) -> None:
        file = str(target / "model.gguf")
        quantize = str(home / "build" / "bin" / "llama-quantize")
        if weights != "bf16":
            whole = str(gguf_file(shape, "bf16", folder, cache))
            command = [quantize, whole, file, weights.upper()]
        elif shape == "gemma":
            # The converter cannot read Gemma's tokenizer from a Hugging Face folder; the demo file contains it.
            command = [quantize, "--allow-requantize", str(demo_model("gemma-3-270m")), file, "BF16"]
        else:
            command = [sys.executable, "-c", CONVERT, str(home / "source"), str(folder)]
            command += ["--outtype", "bf16", "--outfile", file]
        step(f"model {shape} for llama.cpp, {weights}", command)

    return once(cache / "models" / f"{shape}-{weights}-llama.cpp", f"{PACKAGE}{CONVERT}, 2", make) / "model.gguf"


def _install(options: Sequence[str], folder: Path, step: Step) -> None:
    npm, git, cmake = program("npm"), program("git"), program("cmake")
    program("c++")
    step("llama.cpp's source", [npm, "pack", "--silent", "--pack-destination", str(folder), PACKAGE])
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as opened:
        opened.extract("package/llama/gitRelease.bundle", folder, filter="data")
    source, build = folder / "source", folder / "build"
    step("its files", [git, "clone", "--quiet", str(folder / "package/llama/gitRelease.bundle"), str(source)])
    # The package omits this template, which only installations of the library need.
    (source / "ggml" / "ggml.pc.in").touch()
    step("cmake", [cmake, "-S", str(source), "-B", str(build), *options])
    command = [cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1), "--target"]
    step("llama.cpp (minutes)", [*command, "llama-server", "llama-quantize"])
    archive.unlink()
