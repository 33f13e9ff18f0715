"""Where adapters may be loaded from: ``--lora-dir``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stoker_common.errors import NotFoundError, RequestError
from stoker_engine.server.unavailable import ForbiddenError

#: What is read of an adapter's folder.
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


class AdapterFolders:
    """The folders that paths from outside may lead into.

    Args:
        folders: as they were given; they may come to exist later.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders

    async def resolve(self, path: str) -> str:
        """The real path of an adapter's folder, symbolic links followed.

        Raises:
            ForbiddenError: it, or one of its files, lies elsewhere.
            NotFoundError: there is no such folder.
            RequestError: it is no path.
        """
        return await asyncio.to_thread(self._resolve, path)

    def _resolve(self, path: str) -> str:
        try:
            allowed = [Path(folder).resolve() for folder in self._folders]
            folder = Path(path).resolve()
            for real in (folder, *((folder / name).resolve() for name in FILES)):
                if not any(real.is_relative_to(each) for each in allowed):
                    raise ForbiddenError(
                        f"{path[:300]!r} lies in none of the folders that adapters may be loaded from (--lora-dir)",
                        "lora_path",
                    )
            is_folder = folder.is_dir()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, links in a circle
            raise RequestError(f"{path[:300]!r} is no path: {_reason(error)}", "lora_path") from None
        if not is_folder:
            raise NotFoundError(f"there is no folder {path[:300]!r}", "lora_path")
        return str(folder)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
