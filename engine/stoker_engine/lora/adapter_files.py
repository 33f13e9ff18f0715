"""Reads the two files of an adapter's folder into memory."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import deserialize

from stoker_common.errors import AdapterError
from stoker_engine.kernels.cpu.own_pages import own_pages
from stoker_engine.lora.adapter_config import FILE
from stoker_engine.lora.pace import Pace

TENSORS: Final = "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
_MAX_CONFIG_BYTES: Final = 1 << 20

#: Maximum number of bytes read or hashed between two calls of `Pace.give_way`.
_CHUNK_BYTES: Final = 1 << 20

#: Size in bytes of the field at the start of a safetensors file that holds the header's length.
_LENGTH_BYTES: Final = 8

#: A file's hash is remembered only if its last change is older than this, in seconds. A recently changed file could
#: change again with the same timestamp: within one tick of the file system's clock, or if a file server's clock is
#: behind.
_SETTLED_S: Final = 60
#: Maximum number of folders whose hash is remembered.
_MAX_REMEMBERED: Final = 4096

_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _FileId(NamedTuple):
    """Identity of a file's content; a write changes it unless the timestamp stays the same (see `_SETTLED_S`)."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True)
class StoredTensor:
    """Description of a tensor in a safetensors file.

    Attributes:
        dtype: safetensors' name of the dtype, such as "BF16".
        shape: size of each dimension.
        start, end: its bytes in the file are `start` … `end - 1`.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def is_floating(self) -> bool:
        """Whether the dtype is a floating-point dtype that adapters may have."""
        return self.dtype in _DTYPES

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch; only valid if `is_floating`."""
        return _DTYPES[self.dtype]

    @property
    def is_aligned(self) -> bool:
        """Whether `start` is a multiple of the element size."""
        return self.start % self.torch_dtype.itemsize == 0

    def of(self, content: torch.Tensor) -> torch.Tensor:
        """Return the tensor: a view of the content if it is aligned, otherwise a copy.

        Args:
            content: content of the file, uint8 [bytes].
        """
        stored = content[self.start : self.end]
        return (stored if self.is_aligned else stored.clone()).view(self.torch_dtype).view(self.shape)


@dataclass(frozen=True)
class AdapterFiles:
    """Content of an adapter's files.

    Attributes:
        config: content of `adapter_config.json`.
        tensors: content of the safetensors file, uint8 [bytes].
        digest: hexadecimal SHA-256 of both.
        is_known: whether the files' hash is remembered from an earlier read, which has logged the warnings about them.
    """

    config: bytes
    tensors: torch.Tensor
    digest: str
    is_known: bool

    @property
    def header(self) -> bytes:
        """Bytes of the safetensors file before the elements. If the file is damaged, this may be the whole file."""
        length = int.from_bytes(self._bytes(0, _LENGTH_BYTES), "little")
        return self._bytes(0, min(_LENGTH_BYTES + length, len(self.tensors)))

    def stored(self) -> Mapping[str, StoredTensor]:
        """Return the tensors' descriptions by name.

        Raises:
            AdapterError: the file is damaged.
        """
        content = self._bytes(0, len(self.tensors))
        try:
            # deserialize checks the header: shapes, ranges, and that each byte belongs to exactly one tensor.
            deserialize(content)  # type: ignore[no-untyped-call]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the Rust parser may panic on a damaged file
            raise AdapterError(f"{TENSORS} is damaged: {type(error).__name__}: {str(error)[:200]}") from None
        data = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        header = json.loads(content[_LENGTH_BYTES:data])
        return {
            name: StoredTensor(
                tensor["dtype"], tuple(tensor["shape"]), *(data + offset for offset in tensor["data_offsets"])
            )
            for name, tensor in header.items()
            if name != "__metadata__"
        }

    def _bytes(self, start: int, end: int) -> bytes:
        return self.tensors[start:end].numpy().tobytes()


class AdapterFolders:
    """Reader of adapters' folders, which remembers the hashes of files and does not hash unchanged files again.

    Args:
        max_bytes: maximum size of a safetensors file, in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._digests: OrderedDict[tuple[_FileId | None, _FileId | None], str] = OrderedDict()

    def read(self, folder: Path, pace: Pace) -> AdapterFiles:
        """Read a folder's files.

        Raises:
            AdapterError: a file is missing, unreadable or too large.
        """
        config, config_id = _content(folder, FILE, _MAX_CONFIG_BYTES, pace)
        if not (folder / TENSORS).exists() and (folder / _PICKLED).exists():
            raise AdapterError(
                f"{folder} has its matrices in {_PICKLED}, which can run code when read; save the adapter again with "
                "PEFT's save_pretrained(safe_serialization=True)"
            )
        tensors, tensors_id = _content(folder, TENSORS, self._max_bytes, pace)
        described, ids = config.numpy().tobytes(), (config_id, tensors_id)
        if known := self._digests.get(ids):
            self._digests.move_to_end(ids)
            return AdapterFiles(described, tensors, known, is_known=True)
        digest = hashlib.sha256(b"%d %s" % (len(described), described))
        for chunk in tensors.split(_CHUNK_BYTES):
            digest.update(chunk.numpy())
            pace.give_way()
        if all(_is_settled(each) for each in ids):
            self._digests[ids] = digest.hexdigest()
            if len(self._digests) > _MAX_REMEMBERED:
                self._digests.popitem(last=False)
        return AdapterFiles(described, tensors, digest.hexdigest(), is_known=False)


def _is_settled(file: _FileId | None) -> bool:
    return file is not None and time.time_ns() - max(file.modified_ns, file.changed_ns) > _SETTLED_S * 10**9


def _content(folder: Path, name: str, max_bytes: int, pace: Pace) -> tuple[torch.Tensor, _FileId | None]:
    """Return the content of a regular file, uint8 [bytes], and its identity. The identity is None if the
    file changed while it was read."""
    try:
        file = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AdapterError(f"{folder} holds no LoRA adapter: {name} cannot be read: {reason}") from None
    try:
        before = os.fstat(file)
        if not stat.S_ISREG(before.st_mode):
            raise AdapterError(f"{folder} holds no LoRA adapter: {name} is no file")
        if before.st_size > max_bytes:
            raise AdapterError(
                f"{folder}: {name} has {before.st_size} bytes, more than the maximum of {max_bytes} (for {TENSORS} it "
                "grows with --max-lora-rank)"
            )
        size = before.st_size
        content = own_pages(size, size) if size >= _CHUNK_BYTES else torch.empty(size, dtype=torch.uint8)
        rest = content.numpy().data
        while rest and (count := os.readv(file, [rest[:_CHUNK_BYTES]])):
            rest = rest[count:]
            pace.give_way()
        identity = _file_id(os.fstat(file))
        return content[: len(content) - len(rest)], identity if identity == _file_id(before) else None
    except OSError as error:
        raise AdapterError(f"{folder}: {name} cannot be read: {error.strerror}") from None
    finally:
        os.close(file)


def _file_id(status: os.stat_result) -> _FileId:
    return _FileId(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
