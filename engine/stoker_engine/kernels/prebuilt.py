"""Kernels that an image brings along (`stoker build-kernels`), so that a pod compiles none of them."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

#: The environment's variable that names their folder.
VARIABLE: Final = "STOKER_KERNELS"


def use_prebuilt() -> None:
    """Puts them into Triton's cache, which a pod can write to and an image's folder it cannot. What is there already
    stays."""
    folder = Path(os.environ.get(VARIABLE, ""))
    if not os.environ.get(VARIABLE):
        return
    from triton import knobs

    from stoker_engine.kernels.triton.compile.driver import use_built_driver

    use_built_driver(folder)
    cache = Path(knobs.cache.dir)
    try:
        found = sorted(each for each in folder.iterdir() if each.is_dir())
        for kernel in found:
            if (target := cache / kernel.name).exists():
                continue
            partial = cache / f".{kernel.name}.{os.getpid()}"  # renamed when it is whole: ranks start at once
            shutil.copytree(kernel, partial, dirs_exist_ok=True)
            try:
                partial.rename(target)
            except OSError:  # another rank was first
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        logger.warning("%s=%s: %s; kernels are compiled instead", VARIABLE, folder, error.strerror or error)
        return
    logger.info("%s=%s: %d compiled kernels", VARIABLE, folder, len(found))
