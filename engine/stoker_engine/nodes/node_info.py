"""What a node says of itself, and whether that fits node 0: all must run the same model the same way."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract.argv import flag_name
from stoker_engine.contract.engine_args import EngineArgs

#: Arguments that may differ: each node has its own number, and may find the model and reach the head in its own way.
#: No rank reads the others: how much of a prompt a step has, the head's scheduler decides, and offline otherwise.
_MAY_DIFFER: Final = frozenset(
    {
        "model",
        "revision",
        "tokenizer",
        "served_model_name",
        "generation_config",
        "node_rank",
        "master_addr",
        "distributed_timeout_seconds",
        "long_prefill_token_threshold",
        "max_itl_ms",
    }
)


@dataclass(frozen=True)
class NodeInfo:
    """A node.

    Attributes:
        version: of Stoker.
        arguments: those that all nodes share, as words.
        model: tells different models apart.
    """

    version: str
    arguments: dict[str, str]
    model: str

    @classmethod
    def of(cls, args: EngineArgs, model: Path) -> NodeInfo:
        """This node's, whose model is at `model`."""
        arguments = {
            field.name: str(getattr(args, field.name))
            for field in dataclasses.fields(args)
            if field.name not in _MAY_DIFFER
        }
        return cls(version("stoker"), arguments, _digest(model))

    @classmethod
    def read(cls, message: dict[str, Any]) -> NodeInfo:
        """Another node's, from a message; what it lacks is empty."""
        arguments = message.get("arguments")
        return cls(
            str(message.get("version", "")),
            {str(name): str(value) for name, value in arguments.items()} if isinstance(arguments, dict) else {},
            str(message.get("model", "")),
        )

    def refusal(self, other: NodeInfo, name: str) -> ArgumentError | None:
        """What keeps this head from taking in a node; `name` is the node's."""
        if other.version != self.version:
            versions = f"{name} has Stoker {other.version or 'of no version'}, and node 0 has {self.version}"
            return ArgumentError("--nnodes", f"{versions}; run the same version on all nodes")
        for field in sorted(self.arguments.keys() | other.arguments.keys()):
            own_value, other_value = self.arguments.get(field), other.arguments.get(field)
            if own_value != other_value:
                return ArgumentError(
                    flag_name(field),
                    f"{own_value} on node 0, but {other_value} on {name}; start all nodes with the same arguments",
                )
        if other.model != self.model:
            return ArgumentError("MODEL", f"the files on {name} are not those on node 0; give all nodes the same model")
        return None


def _digest(model: Path) -> str:
    """Of what tells models apart quickly: their description, and the names and sizes of their weights' files."""
    digest = hashlib.sha256()
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    for file in files:
        digest.update(f"{file.name if model.is_dir() else ''} {file.stat().st_size}\n".encode())
    config = model / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()
