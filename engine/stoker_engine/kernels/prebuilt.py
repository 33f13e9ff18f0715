"""Prebuilt Triton kernels of an image (`stoker build-kernels`), so that pods need not compile them."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

#: Environment variable with the folder of prebuilt kernels.
VARIABLE: Final = "STOKER_KERNELS"


def use_prebuilt() -> None:
    """Copy the prebuilt kernels in the folder `STOKER_KERNELS`, which is read-only in a pod, into Triton's cache, and
    use the folder's driver module. Existing cache entries are kept. Without the variable, nothing is done."""
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
            partial = cache / f".{kernel.name}.{os.getpid()}"  # renamed when complete, since ranks start concurrently
            shutil.copytree(kernel, partial, dirs_exist_ok=True)
            try:
                partial.rename(target)
            except OSError:  # another rank was first
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        logger.warning("%s=%s: %s; kernels are compiled instead", VARIABLE, folder, error.strerror or error)
        return
    logger.info("%s=%s: %d compiled kernels", VARIABLE, folder, len(found))
