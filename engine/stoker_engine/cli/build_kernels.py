"""``stoker build-kernels MODEL --target sm_90``: compile ahead of time what a GPU pod would compile at its start."""

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
    """Arguments of ``stoker build-kernels``."""

    model: str = flag("a local folder, a GGUF file, demo://NAME, or a Hugging Face hub id", None, positional=True)
    target: tuple[str, ...] = flag("GPUs to compile for: NVIDIA's sm_80 …, AMD's gfx90a …", ())
    output: str | None = flag("cache folder for the kernels; default: Triton's, which `stoker serve` reads", None)
    revision: str | None = flag("branch, tag or commit of a hub model", None)
    dtype: names.Dtype = flag("dtype of weights and activations, as for serve", "auto", choices=names.DTYPES)
    quantization: str | None = flag("weight quantization, as for serve", None)
    kv_cache_dtype: names.KVCacheDtype = flag("KV cache dtype, as for serve", "auto", choices=names.KV_CACHE_DTYPES)
    block_size: int = flag("tokens per KV cache block, as for serve", 16)
    tensor_parallel_size: int = flag("GPUs that share each layer, as for serve", 1)
    enable_expert_parallel: bool = flag("whether each of these GPUs has whole experts, as for serve", False)
    batch_invariant: bool = flag("whether the result of a request has the same bits in any batch, as for serve", False)
    fp8_weight_only: bool = flag("whether FP8 weights are multiplied with unquantized activations, as for serve", False)
    enable_lora: bool = flag("whether LoRA is enabled, as for serve", False)
    max_loras: int = flag("maximum adapters per step, as for serve", EngineArgs.max_loras)
    max_lora_rank: int = flag("maximum rank of an adapter, as for serve", EngineArgs.max_lora_rank)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code (2: invalid arguments or model)."""
    return command_line.run("stoker build-kernels", lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    parser = argv.Parser(
        prog="stoker build-kernels",
        description="Compile the kernels of MODEL ahead of time, for GPUs that this machine need not have.",
        epilog="No weights are read. In an image: RUN stoker build-kernels MODEL --target sm_90 --output DIR, and set "
        "the environment variable STOKER_KERNELS=DIR.",
        allow_abbrev=False,
    )
    argv.add_arguments(parser, BuildKernelsArgs, "build-kernels")
    args = argv.from_namespace(BuildKernelsArgs, command_line.parse(parser, command_line.with_model_flag(arguments)))
    if not args.target:
        raise ArgumentError("--target", "is required, for example sm_90 or gfx942")
    as_served = {name: getattr(args, name) for name in BuildKernelsArgs.__dataclass_fields__}
    del as_served["target"], as_served["output"]
    engine = EngineArgs(**as_served)
    logs.configure("text")
    if args.output is not None:
        os.environ["TRITON_CACHE_DIR"] = str(Path(args.output).expanduser().absolute())
    from stoker_engine.exec.build_kernels import build_kernels_of  # imported here: importing torch takes seconds

    build_kernels_of(engine, args.target)
    return 0
