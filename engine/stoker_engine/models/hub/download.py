"""Download models from the Hugging Face hub into its library's cache (HF_HOME), which processes may share.

A lock lets one process download a repository while others wait for it. This module downloads large files, to the
cache's own paths (``blobs/SHA256``), so that partial downloads of a killed process can be resumed; the library would
restart them, which costs hours for weights. The library downloads all other files.

    blobs/SHA256.incomplete ─ rename ─► blobs/SHA256 ◄─ link ─ snapshots/COMMIT/model.safetensors

The result is also correct without the lock: two processes write the same bytes to the same offsets.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

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

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger(__name__)

#: Pauses between attempts in seconds.
_BACK_OFF_S: Final = (1, 2, 4)
#: Timeout of network operations in seconds; the library has none.
_TIMEOUT_S: Final = 30
_REPORT_EVERY_S: Final = 10
_WORKERS: Final = 8
_GIB: Final = 1024**3

_T = TypeVar("_T")


def download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return the folder with a hub model's files that match `patterns`, downloading missing ones.

    If the hub is unreachable or the download fails, a complete copy in the cache is used.

    Raises:
        ModelNotFoundError, ModelAccessDeniedError, DownloadError: the download failed, and there is no complete copy;
            the message states the remedy.
    """
    set_client_factory(_client)
    if not sys.stderr.isatty():
        disable_progress_bars()  # the log reports progress
    try:
        return _download(name, revision, patterns)
    except HUB_ERRORS as error:
        explained = explain(error, name, revision)
        if (folder := _cached(name, revision, patterns)) is None:
            raise explained from error
        logger.warning("using the cached copy of %s: %s", name, explained)
        return folder


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    resolved = _patiently(lambda: HfApi().resolve_revision(name, revision=revision))
    if (folder := _complete(name, resolved, patterns)) is not None:
        return folder
    storage = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    lock = storage.parent / ".locks" / storage.name / "download.lock"
    with file_lock(lock, lambda: logger.info("waiting for another process that downloads %s", name)):
        if (folder := _complete(name, resolved, patterns)) is not None:
            return folder
        tree = HfApi().list_repo_tree(name, recursive=True, revision=resolved.resolved)
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        needed = filter_repo_objects(files, allow_patterns=list(patterns), key=lambda file: file.path)
        large = [file for file in needed if file.lfs is not None and file.size <= MAX_HTTP_DOWNLOAD_SIZE]
        _patiently(_LargeFiles(name, resolved.resolved, storage / "blobs", large).fetch)
        return Path(snapshot_download(name, revision=resolved, allow_patterns=list(patterns)))


def _patiently(action: Callable[[], _T]) -> _T:
    """Run `action`, and retry temporary failures that the library does not retry."""
    for pause in _BACK_OFF_S:
        try:
            return action()
        except HUB_ERRORS as error:
            if not may_pass(error):
                raise
            logger.warning("%s; retrying in %d s", first_line(error), pause)
            time.sleep(pause)
    return action()


def _complete(name: str, revision: str, patterns: Sequence[str]) -> Path | None:
    """Return the folder if the cache has the repository's file list and all files of the list that match `patterns`,
    otherwise None."""
    try:
        get_cached_repo_tree(name, revision=revision)
    except CachedRepoTreeNotFoundError:
        return None
    return _cached(name, revision, patterns)


def _cached(name: str, revision: str | None, patterns: Sequence[str]) -> Path | None:
    """Return the folder, or None if the cache lacks the revision or a file of its list that matches `patterns`. Makes
    no network requests."""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


class _LargeFiles:
    """Large files, which the cache names by their SHA-256.

    Args:
        name: repository id.
        commit: commit hash.
        folder: the cache's ``blobs`` folder.
    """

    def __init__(self, name: str, commit: str, folder: Path, files: Sequence[RepoFile]) -> None:
        self._name = name
        self._commit = commit
        self._folder = folder
        self._files = files
        self._size = sum(file.size for file in files)

    def fetch(self) -> None:
        """Download the missing files.

        Raises:
            DownloadError: the disk has too little free space.
            HUB_ERRORS: the download failed.
        """
        missing = [file for file in self._files if not self._blob(file).exists()]
        if not missing:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_room()
        # Daemon threads, because the process waits for the threads of an executor when it exits.
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
                failures.append(error)  # continue with the other files
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
        """Download a file, resuming a partial download, and verify its checksum."""
        partial = self._partial(file)
        # Not in append mode: a second writer without the lock then only rewrites the same bytes.
        with _HashedFile(io.FileIO(os.open(partial, os.O_RDWR | os.O_CREAT, 0o664), "r+")) as target:
            have = target.seek(0, os.SEEK_END)
            if have > file.size:
                have = target.seek(target.truncate(0))
            if have:
                logger.info("resuming %s of %s at %.2f GiB", file.path, self._name, have / _GIB)
                target.hash_content()
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
            if target.sha256.hexdigest() != self._blob(file).name:
                partial.unlink()
                raise OSError(f"{file.path}: the download has a wrong checksum; restarting it")
        partial.replace(self._blob(file))

    def _check_room(self) -> None:
        disk = shutil.disk_usage(self._folder)
        needed = self._size - self._have()
        if disk.total and needed > disk.free:
            raise DownloadError(
                f"{self._name} needs {needed / _GIB:.2f} GiB more, and {self._folder} has {disk.free / _GIB:.2f} GiB "
                "free; give spec.storage.cache a larger volume, or on one machine set HF_HUB_CACHE to a folder on "
                "another disk"
            )

    def _have(self) -> int:
        """Return the number of bytes already downloaded."""
        paths = (path for file in self._files for path in (self._blob(file), self._partial(file)))
        return sum(path.stat().st_size for path in paths if path.exists())

    def _blob(self, file: RepoFile) -> Path:
        assert file.lfs is not None
        return self._folder / file.lfs.sha256

    def _partial(self, file: RepoFile) -> Path:
        return self._blob(file).with_suffix(".incomplete")


class _HashedFile(io.BufferedRandom):
    """A file that hashes what is appended, so that a download need not be read again.

    Attributes:
        sha256: hash of the content, if the file was opened empty or `hash_content` was called.
    """

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self.sha256 = hashlib.sha256()

    def hash_content(self) -> None:
        """Hash the present content. The position is then the end."""
        self.seek(0)
        hashlib.file_digest(self, lambda: self.sha256)

    def write(self, data: ReadableBuffer, /) -> int:
        """Append `data`."""
        self.sha256.update(data)
        return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        """Empty the file. `http_get` does this at position 0 if the server cannot resume."""
        assert (self.tell() if size is None else size) == 0
        self.sha256 = hashlib.sha256()
        return super().truncate(size)


def _client() -> Any:
    client = default_client_factory()
    client.timeout = _TIMEOUT_S
    return client
