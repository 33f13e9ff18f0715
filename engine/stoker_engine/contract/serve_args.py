"""All arguments of ``stoker serve``.

The operator builds a `ServeArgs` from an InferenceEndpoint and writes it as a pod's argv, which the engine parses:
``ServeArgs.from_argv(args.to_argv()) == args``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from stoker_common.errors import ArgumentError
from stoker_engine.contract import argv
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs


@dataclass(frozen=True)
class ServeArgs:
    """Arguments of the engine and the front end.

    Raises:
        ArgumentError: node 0 is headless, or another node is not headless; LoRA flags are given without
            ``--enable-lora``; an adapter has the model's name; several front ends are combined with LoRA or
            ``--headless``.
    """

    engine: EngineArgs
    frontend: FrontendArgs = dataclasses.field(default_factory=FrontendArgs)

    def __post_init__(self) -> None:
        if self.frontend.headless and self.engine.node_rank == 0:
            raise ArgumentError("--headless", "node 0 serves the API; omit the flag, or set another --node-rank")
        if self.engine.node_rank and not self.frontend.headless:
            raise ArgumentError(
                "--node-rank", f"only node 0 serves the API, not node {self.engine.node_rank}; add --headless"
            )
        if self.frontend.api_server_count > 1:
            self._check_front_ends()
        if not self.engine.enable_lora and (flags := self.frontend.lora_flags):
            raise ArgumentError(flags[0], "requires --enable-lora")
        for adapter in self.frontend.adapters:
            if adapter.name in self.model_names:
                raise ArgumentError("--lora-modules", f"{adapter.name!r} is the name of the model; choose another name")

    def _check_front_ends(self) -> None:
        if self.frontend.headless:
            raise ArgumentError("--api-server-count", "a node with --headless serves no API; omit the flag")
        if self.engine.enable_lora:
            raise ArgumentError(
                "--api-server-count",
                "LoRA adapters (--enable-lora) are served by one front end; omit --api-server-count, or use "
                "--data-parallel-size or several servers to serve more requests",
            )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model in the API; responses and metrics report the first."""
        return self.engine.served_model_name or (self.engine.model.removeprefix("demo://"),)

    @staticmethod
    def parser(prog: str = "stoker serve") -> argv.Parser:
        """Return the parser of ``stoker serve``; it raises `ArgumentError` and does not exit on invalid flags."""
        parser = argv.Parser(
            prog=prog,
            description="Serve a model behind an OpenAI-compatible API.",
            allow_abbrev=False,
        )
        argv.add_arguments(parser, EngineArgs, "engine")
        argv.add_arguments(parser, FrontendArgs, "HTTP server")
        return parser

    @classmethod
    def from_argv(cls, arguments: Sequence[str]) -> ServeArgs:
        """Parse the command-line arguments after ``stoker serve``.

        Raises:
            ArgumentError: a flag is unknown, or a value is invalid.
        """
        namespace = cls.parser().parse_args(list(arguments))
        return cls(
            engine=argv.from_namespace(EngineArgs, namespace),
            frontend=argv.from_namespace(FrontendArgs, namespace),
        )

    def to_argv(self) -> list[str]:
        """Return the command line after ``stoker serve`` for these arguments, without flags at their default."""
        return argv.to_argv(self.engine) + argv.to_argv(self.frontend)
