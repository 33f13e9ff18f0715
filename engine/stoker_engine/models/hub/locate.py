"""Find the local files of MODEL. Does not import torch: the server runs this while the engine process starts."""

from __future__ import annotations

from pathlib import Path

from stoker_common.errors import ArgumentError, ModelError, ModelNotFoundError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.hub.demo import demo_model

_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken", "README.md", "LICENSE*")
_TOKENIZER_FILES = ("*token*.json", "vocab*", "merges.txt", "*.model", "*.jinja", "*.tiktoken", "config.json")


def locate_model(args: EngineArgs) -> Path:
    """Return MODEL's folder or GGUF file: a local path, ``demo://NAME``, or a hub id, which is downloaded.

    Raises:
        ModelError: the model cannot be found or downloaded.
        ArgumentError: ``--revision`` for a model that is not from the hub.
    """
    if args.revision is not None and not _is_hub_id(args.model):
        raise ArgumentError("--revision", f"{args.model!r} is not a hub id, so it has no revisions; leave it out")
    code = ("*.py",) if args.trust_remote_code else ()
    return _locate(args.model, args.revision, _MODEL_FILES + code)


def find_local_model(args: EngineArgs) -> Path | None:
    """Return MODEL's folder or GGUF file if it is a local path; None: a hub id or a demo model.

    Raises:
        ModelError: MODEL names nothing.
        ArgumentError: see `locate_model`.
    """
    return None if "://" in args.model or _is_hub_id(args.model) else locate_model(args)


def locate_tokenizer(args: EngineArgs, model: Path) -> Path:
    """Return the folder or GGUF file of the tokenizer: ``--tokenizer``, or else `model`.

    Raises:
        ModelError: the tokenizer cannot be found or downloaded.
    """
    return model if args.tokenizer is None else _locate(args.tokenizer, None, _TOKENIZER_FILES)


def _locate(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    scheme, separator, rest = name.partition("://")
    if separator:
        if scheme != "demo":
            raise ModelError(f"{name!r}: use a local path, demo://NAME or a hub id such as org/name")
        return demo_model(rest)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        raise ModelError(f"{path} is not a model; run a manifest with `stoker up -f {path}`")
    if path.is_file():
        raise ModelError(f"{path} is not a GGUF file; give the model's folder")
    if not _is_hub_id(name):
        raise ModelNotFoundError(f"{name!r} is neither a local folder or GGUF file nor a hub id such as org/name")
    from stoker_engine.models.hub.download import download  # importing its library takes a second

    return download(name, revision, patterns)


def _is_hub_id(model: str) -> bool:
    path = Path(model)
    if path.exists() or (path.suffix == ".gguf" and path.parent.is_dir()):
        return False  # a missing GGUF file of an existing folder is a misspelled path
    return model.count("/") == 1 and not model.startswith(("/", ".", "~")) and not model.endswith("/")
