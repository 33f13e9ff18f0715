"""``stoker quantize MODEL --to FORMAT --output PATH``: a model's weights, rounded to fewer bits and written down."""

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

#: GGUF's types that can be written, by ggml's names.
_GGUF_TYPES: Final = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "BF16", "F16")
_ALIASES: Final = {"INT4": "W4A16", "INT8": "W8A16", "FP8": "FP8_DYNAMIC"}
_FORMATS: Final = f"{', '.join(SCHEMES)} of a folder; {', '.join(each.lower() for each in _GGUF_TYPES)} of a GGUF file"


@dataclass(frozen=True)
class QuantizeArgs:
    """What ``stoker quantize`` takes."""

    model: str = flag("a local folder, a GGUF file, demo://NAME, or a Hugging Face hub id", None, positional=True)
    to: str = flag(f"how weights are stored: {_FORMATS}", "")
    output: str = flag("what is written: a new folder; of a GGUF file also a file, NAME.gguf", "")
    group_size: int | None = flag("weights of a row that share a scale, in formats with groups; default: 128", None)
    revision: str | None = flag("branch, tag or commit of a hub model", None)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code (2: it cannot be done, 1: it failed)."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as a shell has it for what runs in the background
            signal.signal(signum, _end)
    return command_line.run("stoker quantize", lambda: _main(arguments))


def _end(signum: int, _: FrameType | None) -> None:
    """Ends the process, and leaves nothing half written.

    At once: an exception out of a signal's handler may break a lock that is being taken, and threads that were being
    started are waited for by nobody; where they compute while Python is taken apart, torch aborts the process.
    """
    try:
        remove_partial()
    finally:
        os._exit(128 + signum)


def _main(arguments: list[str]) -> int:
    parser = argv.Parser(
        prog="stoker quantize",
        description="Round a model's weights to fewer bits and write them down.",
        epilog="Matrices of attention, MLP and experts are quantized, each number to the nearest; GGUF files' "
        "embedding and head as well. Methods that look at data (GPTQ, AWQ) are llm-compressor's.",
        allow_abbrev=False,
    )
    argv.add_arguments(parser, QuantizeArgs, "quantize")
    args = argv.from_namespace(QuantizeArgs, command_line.parse(parser, command_line.with_model_flag(arguments)))
    for name, value in (("--to", args.to), ("--output", args.output)):
        if not value:
            raise ArgumentError(name, "is needed")
    name = args.to.upper().replace("-", "_")
    name = _ALIASES.get(name, name)
    if name not in SCHEMES and name not in _GGUF_TYPES:
        raise ArgumentError("--to", f"{args.to!r} is no format that is written; there are {_FORMATS}")
    if name in SCHEMES:
        print(_to_folder(args, name, with_group_size(SCHEMES[name], args.group_size)))
        return 0
    if args.group_size is not None:
        raise ArgumentError("--group-size", f"of {name} it is given; leave it out")
    print(_to_gguf(args, name))
    return 0


def _to_folder(args: QuantizeArgs, name: str, scheme: Scheme) -> Path:
    target = Path(args.output).expanduser()
    model = _locate(args, target)
    if model.is_file():
        types = ", ".join(each.lower() for each in _GGUF_TYPES)
        raise ModelError(f"{model} is a GGUF file, which becomes {types}; {name} is made of a folder of safetensors")
    from stoker_engine.export.compressed_tensors import export  # torch takes seconds

    export(model, scheme, name, target)
    return target


def _to_gguf(args: QuantizeArgs, name: str) -> Path:
    target = Path(args.output).expanduser()
    model = _locate(args, target)
    if model.is_dir():
        raise ModelError(
            f"{model} is a folder of safetensors, which becomes {', '.join(SCHEMES)}; for {name} first make a GGUF "
            "file of it, with llama.cpp's convert_hf_to_gguf.py"
        )
    from gguf import GGMLQuantizationType

    from stoker_engine.export.gguf_file import export

    export(model, GGMLQuantizationType[name], target)
    return target


def _locate(args: QuantizeArgs, target: Path) -> Path:
    """MODEL on this machine; what cannot be written is said before anything is downloaded."""
    from stoker_engine.models.hub.locate import locate_model

    check_new(target)
    return locate_model(EngineArgs(model=args.model, revision=args.revision))
