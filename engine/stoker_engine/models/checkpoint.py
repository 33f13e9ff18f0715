"""MODEL → a checkpoint on this machine: its config, its weights, and where its tokenizer is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import ArgumentError, ModelError
from stoker_engine.contract.model_config import ModelConfig
from stoker_engine.models.demo import demo_model
from stoker_engine.models.family import Family, WeightNames
from stoker_engine.models.gguf import GGUFFile
from stoker_engine.models.registry import FAMILIES
from stoker_engine.models.weights import SafetensorsFolder, WeightSource


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, found and understood, not yet loaded.

    Attributes:
        path: a Hugging Face folder, or a GGUF file.
    """

    path: Path
    config: ModelConfig
    family: Family
    spelling: WeightNames
    weights: WeightSource


def find_checkpoint(args: EngineArgs) -> Checkpoint:
    """Finds MODEL: a folder, a GGUF file, ``demo://NAME`` or a hub id (downloaded with progress).

    Raises:
        ModelError: it cannot be found, read or served.
        ArgumentError: a revision of something that has none.
    """
    path = _locate(args)
    if path.is_file():
        gguf = GGUFFile(path)
        config = gguf.config()
        family = FAMILIES[config.architecture]
        assert family.gguf is not None, f"{config.architecture} is read from GGUF but has no GGUF names"
        family.check(config)
        return Checkpoint(path, config, family, family.gguf, gguf)
    config = ModelConfig.from_folder(path)
    family = FAMILIES[config.architecture]
    family.check(config)
    return Checkpoint(path, config, family, family.safetensors, SafetensorsFolder(path))


def _locate(args: EngineArgs) -> Path:
    if args.revision is not None and not _is_hub_id(args.model):
        raise ArgumentError("--revision", f"{args.model!r} is no hub model and has no revisions; leave it out")
    scheme, separator, name = args.model.partition("://")
    if separator:
        if scheme != "demo":
            raise ModelError(f"{args.model!r}: use a local path, demo://NAME or a hub id such as org/name")
        return demo_model(name)
    path = Path(args.model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelError(f"{path} is a file but no GGUF file; give the model's folder")
    if not _is_hub_id(args.model):
        raise ModelError(f"{args.model!r} is no folder or GGUF file here, and no hub id such as org/name")
    return _download(args)


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith(("/", ".", "~")) and not Path(model).exists()


def _download(args: EngineArgs) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            args.model,
            revision=args.revision,
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot get {args.model!r} from the model hub: {first_line} "
            "(a gated model needs HF_TOKEN; without a network give a local folder or demo://gemma-3-270m)"
        ) from error
    return Path(folder)
