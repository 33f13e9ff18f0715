"""All that ``stoker serve`` takes.

The operator builds a `ServeArgs` from an InferenceEndpoint and writes it as a pod's argv; the engine reads the same
words back: ``ServeArgs.from_argv(args.to_argv()) == args``.
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
    """The engine's arguments and the front end's.

    Raises:
        ArgumentError: the node that serves the API is headless, or another one is not; flags of adapters are given, and
            none are served; an adapter has the model's name.
    """

    engine: EngineArgs
    frontend: FrontendArgs = dataclasses.field(default_factory=FrontendArgs)

    def __post_init__(self) -> None:
        if self.frontend.headless and self.engine.node_rank == 0:
            raise ArgumentError("--headless", "node 0 serves the API; leave it out, or give another --node-rank")
        if self.engine.node_rank and not self.frontend.headless:
            raise ArgumentError(
                "--node-rank", f"node {self.engine.node_rank} serves no API, node 0 does; add --headless, or be node 0"
            )
        if not self.engine.enable_lora and (flags := self.frontend.lora_flags):
            raise ArgumentError(flags[0], "needs --enable-lora")
        for adapter in self.frontend.adapters:
            if adapter.name in self.model_names:
                raise ArgumentError("--lora-modules", f"{adapter.name!r} is the model's own name; choose another")

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that the model answers to; responses and metrics carry the first."""
        return self.engine.served_model_name or (self.engine.model.removeprefix("demo://"),)

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
    def from_argv(cls, arguments: Sequence[str]) -> ServeArgs:
        """Parses the words after ``stoker serve``.

        Raises:
            ArgumentError: an unknown flag, or a value out of range.
        """
        namespace = cls.parser().parse_args(list(arguments))
        return cls(
            engine=argv.from_namespace(EngineArgs, namespace),
            frontend=argv.from_namespace(FrontendArgs, namespace),
        )

    def to_argv(self) -> list[str]:
        """The words after ``stoker serve`` that say the same; defaults are left out."""
        return argv.to_argv(self.engine) + argv.to_argv(self.frontend)
