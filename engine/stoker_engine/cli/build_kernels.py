"""``stoker build-kernels MODEL --target sm_90``: what a GPU pod would compile when it starts, compiled beforehand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stoker_common.errors import ArgumentError
from stoker_engine import logs
from stoker_engine.cli import command_line
from stoker_engine.contract import argv, names
from stoker_engine.contract.argv import flag
from stoker_engine.contract.engine_args import EngineArgs


@dataclass(frozen=True)
class BuildKernelsArgs:
    """What ``stoker build-kernels`` takes."""

    model: str = flag("a local folder, a GGUF file, demo://NAME, or a Hugging Face hub id", None, positional=True)
    target: tuple[str, ...] = flag("GPUs to compile for: sm_80 … of NVIDIA's, gfx90a … of AMD's", ())
    output: str | None = flag("the cache that kernels go to; default: Triton's own, which `stoker serve` reads", None)
    revision: str | None = flag("branch, tag or commit of a hub model", None)
    dtype: names.Dtype = flag("weights and activations, as served", "auto", choices=names.DTYPES)
    quantization: str | None = flag("how weights are stored, as served", None)
    kv_cache_dtype: names.KVCacheDtype = flag("keys and values, as served", "auto", choices=names.KV_CACHE_DTYPES)
    block_size: int = flag("tokens in one KV-cache block, as served", 16)
    tensor_parallel_size: int = flag("GPUs that share each layer, as served", 1)
    enable_expert_parallel: bool = flag("whether each of these GPUs has whole experts, as served", False)
    batch_invariant: bool = flag("whether a request must give the same bits in any batch, as served", False)
    enable_lora: bool = flag("whether LoRA is on, as served", False)
    max_loras: int = flag("most adapters in one step, as served", EngineArgs.max_loras)
    max_lora_rank: int = flag("largest rank of an adapter, as served", EngineArgs.max_lora_rank)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code (2: it cannot be done)."""
    return command_line.run("stoker build-kernels", lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    parser = argv.Parser(
        prog="stoker build-kernels",
        description="Compile the kernels that MODEL is computed with, for GPUs that need not be here.",
        epilog="No weights are read. In an image: RUN stoker build-kernels MODEL --target sm_90 --output DIR, with "
        "STOKER_KERNELS=DIR in its environment.",
        allow_abbrev=False,
    )
    argv.add_arguments(parser, BuildKernelsArgs, "build-kernels")
    args = argv.from_namespace(BuildKernelsArgs, command_line.parse(parser, command_line.with_model_flag(arguments)))
    if not args.target:
        raise ArgumentError("--target", "is needed: which GPUs, such as sm_90 or gfx942")
    as_served = {name: getattr(args, name) for name in BuildKernelsArgs.__dataclass_fields__}
    del as_served["target"], as_served["output"]
    engine = EngineArgs(**as_served)
    logs.configure("text")
    if args.output is not None:
        os.environ["TRITON_CACHE_DIR"] = str(Path(args.output).expanduser().absolute())
    from stoker_engine.exec.build_kernels import build_kernels_of  # torch takes seconds

    build_kernels_of(engine, args.target)
    return 0
