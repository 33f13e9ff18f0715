"""``stoker quantize MODEL --to FORMAT --output PATH``: quantize a model's weights and save them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from stoker_common.errors import ArgumentError, ModelError
from stoker_engine.cli import command_line
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.export.output import check_new, remove_partial
from stoker_engine.export.schemes import SCHEMES, Scheme, with_group_size

#: Supported GGUF output types, by ggml's names.
_GGUF_TYPES: Final = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "BF16", "F16")
_ALIASES: Final = {"INT4": "W4A16", "INT8": "W8A16", "FP8": "FP8_DYNAMIC"}
_FORMATS: Final = f"{', '.join(SCHEMES)} (of a folder); {', '.join(each.lower() for each in _GGUF_TYPES)} (of GGUF)"


@dataclass(frozen=True)
class QuantizeArgs:
    """Arguments of ``stoker quantize``."""

    model: str = flag("a local folder, a GGUF file, demo://NAME, or a Hugging Face hub id", None, positional=True)
    to: str = flag(f"format of the weights: {_FORMATS}", "")
    output: str = flag("path of the output: a new folder; for a GGUF file also a file, NAME.gguf", "")
    group_size: int | None = flag("weights of a row that share a scale, in formats with groups; default: 128", None)
    revision: str | None = flag("branch, tag or commit of a hub model", None)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code (2: invalid arguments or model, 1: another error). SIGTERM and SIGINT,
    unless ignored, end the process with exit code 128 + the signal's number."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # shells ignore SIGINT for background jobs
            signal.signal(signum, _end)
    return command_line.run("stoker quantize", lambda: _main(arguments))


def _end(signum: int, _: FrameType | None) -> None:
    """Remove partial output and end the process immediately.

    An exception from a signal handler could break a lock that is being acquired, and threads that are being started
    would never be joined; if such threads compute while the interpreter shuts down, torch aborts the process.
    """
    try:
        remove_partial()
    finally:
        os._exit(128 + signum)


def _main(arguments: list[str]) -> int:
    parser = argv.Parser(
        prog="stoker quantize",
        description="Quantize a model's weights and save them.",
        epilog="Matrices of attention, MLP and experts are quantized by rounding to nearest; in GGUF files also the "
        "embedding and the head. For calibrated methods (GPTQ, AWQ) use llm-compressor.",
        allow_abbrev=False,
    )
    argv.add_arguments(parser, QuantizeArgs, "quantize")
    args = argv.from_namespace(QuantizeArgs, command_line.parse(parser, command_line.with_model_flag(arguments)))
    for name, value in (("--to", args.to), ("--output", args.output)):
        if not value:
            raise ArgumentError(name, "is required")
    name = args.to.upper().replace("-", "_")
    name = _ALIASES.get(name, name)
    if name not in SCHEMES and name not in _GGUF_TYPES:
        raise ArgumentError("--to", f"{args.to!r} is not a supported output format; supported: {_FORMATS}")
    if name in SCHEMES:
        print(_to_folder(args, name, with_group_size(SCHEMES[name], args.group_size)))
        return 0
    if args.group_size is not None:
        raise ArgumentError("--group-size", f"is fixed for {name}; omit it")
    print(_to_gguf(args, name))
    return 0


def _to_folder(args: QuantizeArgs, name: str, scheme: Scheme) -> Path:
    target = Path(args.output).expanduser()
    model = _locate(args, target)
    if model.is_file():
        types = ", ".join(each.lower() for each in _GGUF_TYPES)
        raise ModelError(f"{model} is a GGUF file, which can become {types}; {name} requires a folder of safetensors")
    from stoker_engine.export.compressed_tensors import export  # imported here: importing torch takes seconds

    export(model, scheme, name, target)
    return target


def _to_gguf(args: QuantizeArgs, name: str) -> Path:
    target = Path(args.output).expanduser()
    model = _locate(args, target)
    if model.is_dir():
        raise ModelError(
            f"{model} is a folder of safetensors, which can become {', '.join(SCHEMES)}; for {name} first convert it "
            "to a GGUF file, with llama.cpp's convert_hf_to_gguf.py"
        )
    from gguf import GGMLQuantizationType

    from stoker_engine.export.gguf_file import export

    export(model, GGMLQuantizationType[name], target)
    return target


def _locate(args: QuantizeArgs, target: Path) -> Path:
    """Return the path of MODEL on this machine. Refuses an existing output before anything is downloaded."""
    from stoker_engine.models.hub.locate import locate_model

    check_new(target)
    return locate_model(EngineArgs(model=args.model, revision=args.revision))
