"""Models from the Hugging Face hub, in its library's cache (HF_HOME), which many processes may share.

Of a repository one process downloads at a time, and the others find everything there. What a killed process had of a
large file is kept and continued: the library itself begins such a file again, which for weights is hours. So large
files are fetched here, into the cache's own places (``blobs/SHA256``), and the library does the rest.

    blobs/SHA256.incomplete ─ rename ─► blobs/SHA256 ◄─ link ─ snapshots/COMMIT/model.safetensors

Without the lock all of it stays right: two processes write the same bytes to the same places.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from huggingface_hub import HfApi, get_cached_repo_tree, hf_hub_url, set_client_factory, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE, MAX_HTTP_DOWNLOAD_SIZE
from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils._paths import filter_repo_objects
from huggingface_hub.utils.tqdm import disable_progress_bars

from stoker_common.errors import DownloadError
from stoker_engine.models.hub.file_lock import file_lock
from stoker_engine.models.hub.hub_errors import HUB_ERRORS, explain, first_line, may_pass

logger = logging.getLogger(__name__)

#: Seconds to wait after each failed attempt.
_BACK_OFF_S: Final = (1, 2, 4)
#: Seconds without a byte; the library itself would wait for ever.
_TIMEOUT_S: Final = 30
_REPORT_EVERY_S: Final = 10
_WORKERS: Final = 8
_GIB: Final = 1024**3

_T = TypeVar("_T")


def download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder of a hub model's files that match `patterns`; downloaded where they are not there.

    Where the hub cannot be asked, what is in the cache is taken if it is complete.

    Raises:
        ModelNotFoundError, ModelAccessDeniedError, DownloadError: with the remedy.
    """
    set_client_factory(_client)
    if not sys.stderr.isatty():
        disable_progress_bars()  # the log reports it
    try:
        return _download(name, revision, patterns)
    except HUB_ERRORS as error:
        explained = explain(error, name, revision)
        if (folder := _cached(name, revision, patterns)) is None:
            raise explained from error
        logger.warning("%s is taken from the cache as it is there: %s", name, explained)
        return folder


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    resolved = _patiently(lambda: HfApi().resolve_revision(name, revision=revision))
    if (folder := _complete(name, resolved, patterns)) is not None:
        return folder
    storage = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    lock = storage.parent / ".locks" / storage.name / "download.lock"
    with file_lock(lock, lambda: logger.info("another process downloads %s; waiting for it", name)):
        if (folder := _complete(name, resolved, patterns)) is not None:
            return folder
        tree = HfApi().list_repo_tree(name, recursive=True, revision=resolved.resolved)
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        needed = filter_repo_objects(files, allow_patterns=list(patterns), key=lambda file: file.path)
        large = [file for file in needed if file.lfs is not None and file.size <= MAX_HTTP_DOWNLOAD_SIZE]
        _patiently(_LargeFiles(name, resolved.resolved, storage / "blobs", large).fetch)
        return Path(snapshot_download(name, revision=resolved, allow_patterns=list(patterns)))


def _patiently(action: Callable[[], _T]) -> _T:
    """Does what the library does not try again by itself."""
    for pause in _BACK_OFF_S:
        try:
            return action()
        except HUB_ERRORS as error:
            if not may_pass(error):
                raise
            logger.warning("%s; trying again in %d s", first_line(error), pause)
            time.sleep(pause)
    return action()


def _complete(name: str, revision: str, patterns: Sequence[str]) -> Path | None:
    """The folder, if the cache has all files that the hub once listed."""
    try:
        get_cached_repo_tree(name, revision=revision)
    except CachedRepoTreeNotFoundError:
        return None
    return _cached(name, revision, patterns)


def _cached(name: str, revision: str | None, patterns: Sequence[str]) -> Path | None:
    """The folder, unless the cache lacks a file that it knows of. Asks nobody."""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


class _LargeFiles:
    """Files whose names in the cache are the hashes of what is in them.

    Args:
        commit: which of the repository's.
        folder: where the files go.
    """

    def __init__(self, name: str, commit: str, folder: Path, files: Sequence[RepoFile]) -> None:
        self._name = name
        self._commit = commit
        self._folder = folder
        self._files = files
        self._size = sum(file.size for file in files)

    def fetch(self) -> None:
        """Fetches those that are not there.

        Raises:
            DownloadError: there is no room for them.
            OSError, httpx's errors: as they come.
        """
        missing = [file for file in self._files if not self._blob(file).exists()]
        if not missing:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_room()
        # Threads of our own: an executor's are waited for when the process ends, however much there is to download.
        tasks: queue.SimpleQueue[RepoFile] = queue.SimpleQueue()
        results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        for file in missing:
            tasks.put(file)
        for _ in range(min(_WORKERS, len(missing))):
            threading.Thread(target=self._work, args=(tasks, results), name="download", daemon=True).start()
        failures = []
        for _ in missing:
            if (error := self._await(results)) is not None:
                if not may_pass(error):
                    raise error
                failures.append(error)  # the other files are wanted all the same, and one thread a file is enough
        if failures:
            raise failures[0]
        logger.info("downloaded %s: %.2f GiB", self._name, self._size / _GIB)

    def _await(self, results: queue.SimpleQueue[Exception | None]) -> Exception | None:
        while True:
            try:
                return results.get(timeout=_REPORT_EVERY_S)
            except queue.Empty:
                logger.info("downloading %s: %.2f of %.2f GiB", self._name, self._have() / _GIB, self._size / _GIB)

    def _work(self, tasks: queue.SimpleQueue[RepoFile], results: queue.SimpleQueue[Exception | None]) -> None:
        while True:
            try:
                file = tasks.get_nowait()
            except queue.Empty:
                return
            try:
                self._fetch(file)
            except Exception as error:
                results.put(error)
            else:
                results.put(None)

    def _fetch(self, file: RepoFile) -> None:
        """Fetches a file, from where the last attempt got to."""
        partial = self._partial(file)
        # Not by appending: who writes without the lock then writes what is there already.
        with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o664), "r+b") as target:
            have = target.seek(0, os.SEEK_END)
            if have > file.size:
                have = target.seek(target.truncate(0))
            if have:
                logger.info("%s of %s: continued at %.2f GiB", file.path, self._name, have / _GIB)
            http_get(
                hf_hub_url(self._name, file.path, revision=self._commit),
                target,
                resume_size=have,
                headers=build_hf_headers(headers={"Accept-Encoding": "identity"}),
                expected_size=file.size,
                displayed_filename=file.path,
            )
            target.flush()
            os.fsync(target.fileno())
            if have and not _has_hash(target, self._blob(file).name):
                partial.unlink()
                raise OSError(f"{file.path}: what was continued is not what the hub has; it is fetched again")
        partial.replace(self._blob(file))

    def _check_room(self) -> None:
        disk = shutil.disk_usage(self._folder)
        needed = self._size - self._have()
        if disk.total and needed > disk.free:
            raise DownloadError(
                f"{self._name} needs {needed / _GIB:.2f} GiB more, and {self._folder} has {disk.free / _GIB:.2f} GiB "
                "free; give spec.storage.cache a larger volume"
            )

    def _have(self) -> int:
        """Bytes that are there."""
        paths = (path for file in self._files for path in (self._blob(file), self._partial(file)))
        return sum(path.stat().st_size for path in paths if path.exists())

    def _blob(self, file: RepoFile) -> Path:
        assert file.lfs is not None
        return self._folder / file.lfs.sha256

    def _partial(self, file: RepoFile) -> Path:
        return self._blob(file).with_suffix(".incomplete")


def _has_hash(file: BinaryIO, sha256: str) -> bool:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest() == sha256  # type: ignore[arg-type]


def _client() -> Any:
    client = default_client_factory()
    client.timeout = _TIMEOUT_S
    return client
