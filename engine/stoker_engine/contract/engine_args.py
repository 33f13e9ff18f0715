"""The arguments of the engine and of its HTTP front end, with vLLM's names.

`ServeArgs` is what ``stoker serve`` takes. The operator builds one from an InferenceEndpoint and writes it
as a pod's argv; the engine reads the same words back: ``ServeArgs.from_argv(args.to_argv()) == args``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from stoker_engine.contract import argv, names
from stoker_engine.contract.argv import flag
from stoker_engine.contract.errors import ArgumentError


@dataclass(frozen=True)
class EngineArgs:
    """How a model is loaded and run. ``LLM(model, **fields)`` takes the same fields.

    Raises:
        ArgumentError: a value is out of range or not supported, naming the flag and the remedy.
    """

    model: str = flag("a local folder, a GGUF file, demo://NAME, or a Hugging Face hub id", None, positional=True)
    served_model_name: tuple[str, ...] = flag(
        "name(s) the API answers to; the first is reported in responses and metrics", ()
    )
    revision: str | None = flag("branch, tag or commit of a hub model", None)
    dtype: names.Dtype = flag(
        "weights and activations; auto: the checkpoint's own, float32 for GGUF",
        "auto",
        choices=names.DTYPES,
    )
    max_model_len: int | None = flag("longest sequence, prompt and output; default: the model's own", None)
    seed: int = flag("seeds the requests that do not seed themselves, so that a restart repeats a run", 0)
    device: names.Device = flag("where to run; auto takes the accelerator there is", "auto", choices=names.DEVICES)

    block_size: int = flag("tokens in one KV-cache block", 16)
    gpu_memory_utilization: float = flag("share of the device's memory the engine may use, 0 to 1", 0.92)
    kv_cache_memory_bytes: int | None = flag("size of the KV cache; overrides --gpu-memory-utilization", None)
    num_gpu_blocks_override: int | None = flag("exact number of KV-cache blocks; overrides both", None)
    kv_cache_dtype: names.KVCacheDtype = flag(
        "dtype of the KV cache; auto: that of the model", "auto", choices=names.KV_CACHE_DTYPES
    )
    enable_prefix_caching: bool = flag("reuse KV-cache blocks of equal prefixes", True)

    max_num_seqs: int = flag("most sequences in one step", 256)
    max_num_batched_tokens: int = flag("most tokens in one step, over all sequences", 2048)

    tensor_parallel_size: int = flag("devices each layer is split over", 1)
    pipeline_parallel_size: int = flag("groups of devices the layers are spread over", 1)
    data_parallel_size: int = flag("copies of the model", 1)

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ArgumentError(argv.flag_name(name), f"must be at least 1, got {getattr(self, name)}")
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(argv.flag_name(name), f"must be at least 1, got {value}")
        for name, allowed in (
            ("dtype", names.DTYPES),
            ("kv_cache_dtype", names.KV_CACHE_DTYPES),
            ("device", names.DEVICES),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(argv.flag_name(name), f"{getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ArgumentError(
                "--gpu-memory-utilization",
                f"must be above 0 and at most 1, got {self.gpu_memory_utilization}",
            )
        if self.block_size & (self.block_size - 1):
            raise ArgumentError("--block-size", f"must be a power of two, got {self.block_size}")


@dataclass(frozen=True)
class FrontendArgs:
    """How the HTTP server listens and renders prompts."""

    host: str = flag("address to listen on", "0.0.0.0")
    port: int = flag("port to listen on", 8000)
    chat_template: str | None = flag(
        "a Jinja chat template: a file, or the template itself; default: the tokenizer's own", None
    )
    uvicorn_log_level: str = flag(
        "log level of the HTTP server",
        "info",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ArgumentError("--port", f"must be 0 to 65535, got {self.port}")


@dataclass(frozen=True)
class ServeArgs:
    """All that ``stoker serve`` takes."""

    engine: EngineArgs
    frontend: FrontendArgs = dataclasses.field(default_factory=FrontendArgs)

    @staticmethod
    def parser(prog: str = "stoker serve") -> argv.Parser:
        """The parser behind ``stoker serve --help``; raises `ArgumentError`, never exits on a bad flag."""
        parser = argv.Parser(
            prog=prog,
            description="Serve a model behind an OpenAI-compatible API.",
            allow_abbrev=False,
        )
        argv.add_arguments(parser, EngineArgs, "engine")
        argv.add_arguments(parser, FrontendArgs, "HTTP server")
        return parser

    @classmethod
    def from_argv(cls, words: Sequence[str]) -> ServeArgs:
        """Parses the words after ``stoker serve``.

        Raises:
            ArgumentError: an unknown flag, or a value out of range.
        """
        namespace = cls.parser().parse_args(list(words))
        return cls(
            engine=argv.from_namespace(EngineArgs, namespace),
            frontend=argv.from_namespace(FrontendArgs, namespace),
        )

    def to_argv(self) -> list[str]:
        """The words after ``stoker serve`` that say the same; defaults are left out."""
        return argv.to_argv(self.engine) + argv.to_argv(self.frontend)
