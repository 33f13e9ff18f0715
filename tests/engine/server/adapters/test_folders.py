"""Paths from clients and files must lie in the folders of ``--lora-dir``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stoker_common.errors import NotFoundError, RequestError
from stoker_engine.server.adapters.folders import AdapterFolders
from stoker_engine.server.unavailable import ForbiddenError


def _resolve(folders: AdapterFolders, path: Path | str) -> str:
    return asyncio.run(folders.resolve(str(path)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A permitted folder with an adapter, beside a folder that is not permitted."""
    for name in ("allowed/inner/a", "other/a"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def test_folders_within_lora_dir_are_found(root: Path) -> None:
    folders = AdapterFolders([str(root / "nowhere"), str(root / "allowed")])
    expected = str((root / "allowed/inner/a").resolve())
    assert _resolve(folders, root / "allowed/inner/a") == expected
    assert _resolve(folders, root / "other/../allowed/inner/./a") == expected
    (root / "allowed/link").symlink_to("inner/a")
    assert _resolve(folders, root / "allowed/link") == expected
    (root / "link").symlink_to("allowed")
    assert _resolve(AdapterFolders([str(root / "link")]), root / "link/inner/a") == expected


@pytest.mark.parametrize("path", ["other/a", "allowed/../other/a", "allowed/../allowed2", "link/a", "nowhere", "/", ""])
def test_paths_elsewhere_are_refused_whether_they_exist_or_not(root: Path, path: str) -> None:
    (root / "link").symlink_to("other")
    (root / "allowed2").mkdir()
    with pytest.raises(ForbiddenError, match="--lora-dir"):
        _resolve(AdapterFolders([str(root / "allowed")]), root / path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_symlinks_to_files_outside_are_refused(root: Path, name: str) -> None:
    (root / "allowed/inner/a" / name).symlink_to(root / "other/file")
    with pytest.raises(ForbiddenError):
        _resolve(AdapterFolders([str(root / "allowed")]), root / "allowed/inner/a")


def test_paths_that_are_no_folder_are_refused(root: Path) -> None:
    folders = AdapterFolders([str(root / "allowed")])
    (root / "allowed/file").touch()
    (root / "allowed/circle").symlink_to("circle")
    for path in ("allowed/b", "allowed/file"):
        with pytest.raises(NotFoundError, match="does not exist"):
            _resolve(folders, root / path)
    for path in (f"{root}/allowed/\0", f"{root}/allowed/{'a' * 5000}", f"{root}/allowed/circle"):
        with pytest.raises(RequestError):
            _resolve(folders, path)
