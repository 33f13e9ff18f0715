"""``--lora-config``: a file that lists the adapters to serve, and is reread when it changes.

.. code-block:: yaml

    adapters:
      - name: support
        path: /adapters/support-v3

New adapters are loaded, removed ones unloaded, and adapters with a changed entry reloaded in place. An adapter that
cannot be loaded, or that restarted engines could not load again, is reported and retried when the file changes; a load
that an engine's death interrupted is retried at the next check. The other adapters are served meanwhile. A new version
of the file that cannot be read, or is invalid, is ignored.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Final

import yaml

from stoker_common.errors import AdapterError, ArgumentError, EngineDeadError, RequestError
from stoker_engine.contract.lora_modules import LoRAModule
from stoker_engine.server.adapters.folders import AdapterFolders
from stoker_engine.server.adapters.registry import LOADS_AT_ONCE, AdapterRegistry, Origin, at_most

logger = logging.getLogger(__name__)

#: Seconds between checks of the file, which is polled because few file watchers follow the symlinks of a mounted
#: ConfigMap.
INTERVAL_S: Final = 1.0
#: Maximum size of the file in bytes.
_MAX_BYTES: Final = 4 * 1024**2

_Stamp = tuple[int, int, int, int]


class AdapterConfigFile:
    """Loads and unloads the adapters of ``--lora-config``.

    Raises:
        ArgumentError: the file cannot be read, or is invalid.

    Attributes:
        is_settled: whether the file has been applied once without an `EngineDeadError`.
    """

    def __init__(
        self, file: Path, registry: AdapterRegistry, folders: AdapterFolders, interval_s: float = INTERVAL_S
    ) -> None:
        self.is_settled = False
        self._file = file
        self._registry = registry
        self._folders = folders
        self._interval_s = interval_s
        self._stamp: _Stamp | None = None
        self._complaint: str | None = None
        self._lost = False  # whether an engine's death interrupted a load
        try:
            self._modules = self._read()
        except (OSError, ValueError) as error:
            raise ArgumentError("--lora-config", f"cannot read {file}: {error}") from error

    async def watch(self) -> None:
        """Apply the file and its changes until cancelled."""
        while True:
            try:
                await self.apply()
            except Exception:
                logger.exception("cannot apply the adapters of %s", self._file)
            self.is_settled |= not self._lost
            await self._wait()

    async def _wait(self) -> None:
        """Wait until the file has a new valid version; after an `EngineDeadError` only until the next check."""
        while True:
            await asyncio.sleep(self._interval_s)
            if await asyncio.to_thread(self._has_changed) or self._lost:
                return

    async def apply(self) -> None:
        """Load and unload adapters according to the last valid version of the file."""
        self._lost = False
        listed = {module.name: module for module in self._modules}
        for name in [name for name in self._served_names() if name not in listed]:
            await self._registry.unload(name, Origin.CONFIG)
        self._registry.keep_failures(listed)
        changed = [module for module in self._modules if self._is_new(module)]
        await at_most(LOADS_AT_ONCE, [self._load(module) for module in changed])
        if changed:
            logger.info("%s: %d of %d adapters are served", self._file, len(self._served_names()), len(listed))

    def _served_names(self) -> list[str]:
        return [each.module.name for each in self._registry if each.origin is Origin.CONFIG]

    def _is_new(self, module: LoRAModule) -> bool:
        adapter = self._registry.get(module.name)
        return adapter is None or adapter.module != module or self._registry.error_of(adapter) is not None

    async def _load(self, module: LoRAModule) -> None:
        try:
            folder = await self._folders.resolve(module.path)
            await self._registry.load(module, Origin.CONFIG, folder=folder, in_place=True)
        except EngineDeadError as error:
            self._lost = True
            self._registry.fail(module.name, str(error))
        except (AdapterError, RequestError) as error:
            self._registry.fail(module.name, str(error))
            logger.error("cannot load the LoRA adapter %s from %s: %s", module.name, module.path, error)
        except Exception:  # an internal error must not stop the loads of others
            self._registry.fail(module.name, "it cannot be loaded; see the log")
            logger.exception("cannot load the LoRA adapter %s from %s", module.name, module.path)

    def _has_changed(self) -> bool:
        try:
            if _stamp(self._file) == self._stamp:
                return False
            self._modules = self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("cannot reread the adapters; they stay unchanged: %s", error)
            return False
        self._complaint = None
        return True

    def _read(self) -> list[LoRAModule]:
        """Return the adapters that the file lists.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is invalid.
        """
        stamp = _stamp(self._file)
        with self._file.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        modules = parse(content)
        self._stamp = stamp
        return modules


def parse(content: bytes) -> list[LoRAModule]:
    """Return the adapters that the content of a file lists.

    Raises:
        ValueError: the content is invalid; the message says why.
    """
    try:
        loaded: Any = yaml.safe_load(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"it is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict) or set(loaded) != {"adapters"}:
        raise ValueError("it must be an object with the one field adapters")
    if not isinstance(loaded["adapters"] or [], list):
        raise ValueError("adapters must be a list of objects with name and path")
    modules = [LoRAModule.of_object(each) for each in loaded["adapters"] or []]
    names: set[str] = set()
    for module in modules:
        if module.name in names:
            raise ValueError(f"two adapters have the name {module.name!r}")
        names.add(module.name)
    return modules


def _stamp(file: Path) -> _Stamp:
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
