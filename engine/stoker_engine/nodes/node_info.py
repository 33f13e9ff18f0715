"""A node's description of itself, which node 0 compares with its own. All but some arguments must be equal."""

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

#: Arguments that may differ between nodes. Only node 0 uses `long_prefill_token_threshold` and `max_itl_ms`, which have
#: other defaults offline than in the server.
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
    """Description of a node.

    Attributes:
        version: version of Stoker.
        arguments: arguments that must be equal on all nodes, name → text.
        model: digest of the model's files, see `_digest`.
    """

    version: str
    arguments: dict[str, str]
    model: str

    @classmethod
    def of(cls, args: EngineArgs, model: Path) -> NodeInfo:
        """Return the description of this node, whose model's files are at `model`."""
        arguments = {
            field.name: str(getattr(args, field.name))
            for field in dataclasses.fields(args)
            if field.name not in _MAY_DIFFER
        }
        return cls(version("stoker"), arguments, _digest(model))

    @classmethod
    def read(cls, message: dict[str, Any]) -> NodeInfo:
        """Read another node's description from a message. Missing fields are empty."""
        arguments = message.get("arguments")
        return cls(
            str(message.get("version", "")),
            {str(name): str(value) for name, value in arguments.items()} if isinstance(arguments, dict) else {},
            str(message.get("model", "")),
        )

    def refusal(self, other: NodeInfo, name: str) -> ArgumentError | None:
        """Return the error for which node 0 (this object) must reject another node; None: the node is accepted.

        Args:
            name: the other node's name in messages.
        """
        if other.version != self.version:
            versions = f"{name} has Stoker {other.version or '(unknown version)'}, and node 0 has {self.version}"
            return ArgumentError("--nnodes", f"{versions}; run the same version on all nodes")
        for field in sorted(self.arguments.keys() | other.arguments.keys()):
            own_value, other_value = self.arguments.get(field), other.arguments.get(field)
            if own_value != other_value:
                values = f"{_shown(own_value)} on node 0, but {_shown(other_value)} on {name}"
                return ArgumentError(flag_name(field), f"{values}; start all nodes with the same arguments")
        if other.model != self.model:
            return ArgumentError(
                "MODEL", f"the files on {name} differ from those on node 0; use the same model on all nodes"
            )
        return None


def _digest(model: Path) -> str:
    """Return a quick digest of a model: of its safetensors files' names and sizes and its config.json, if it exists;
    or of the size of a model that is a single file."""
    digest = hashlib.sha256()
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    for file in files:
        digest.update(f"{file.name if model.is_dir() else ''} {file.stat().st_size}\n".encode())
    config = model / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()


def _shown(value: str | None) -> str:
    return "unset" if value in (None, "None") else str(value)
