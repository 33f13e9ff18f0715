"""``--lora-dir``: folders from which requests and ``--lora-config`` may load adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stoker_common.errors import NotFoundError, RequestError
from stoker_engine.server.unavailable import ForbiddenError

#: Files read from an adapter's folder.
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


class AdapterFolders:
    """Checks that adapters are within the allowed folders.

    Args:
        folders: the allowed folders, which may be created later.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders

    async def resolve(self, path: str) -> str:
        """Return the real path of an adapter's folder, with symbolic links resolved.

        Raises:
            ForbiddenError: the folder, or one of `FILES` in it, is outside the allowed folders.
            NotFoundError: there is no such folder.
            RequestError: the path is invalid.
        """
        return await asyncio.to_thread(self._resolve, path)

    def _resolve(self, path: str) -> str:
        try:
            allowed = [Path(folder).resolve() for folder in self._folders]
            folder = Path(path).resolve()
            for real in (folder, *((folder / name).resolve() for name in FILES)):
                if not any(real.is_relative_to(each) for each in allowed):
                    raise ForbiddenError(
                        f"{path[:300]!r} or a file in it is outside the allowed folders (--lora-dir)",
                        "lora_path",
                    )
            is_folder = folder.is_dir()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a symlink loop
            raise RequestError(f"invalid path {path[:300]!r}: {_reason(error)}", "lora_path") from None
        if not is_folder:
            raise NotFoundError(f"folder {path[:300]!r} does not exist", "lora_path")
        return str(folder)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
