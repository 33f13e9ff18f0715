"""Folders of HTTP metrics: who removes which."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest

from stoker_engine.server.front_ends.metrics_folder import metrics_folder


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_exists_in_its_context_only(tmp_path: Path) -> None:
    with metrics_folder() as folder:
        (folder / "counter_1.db").write_text("1")
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_only_folders_without_an_owner_are_removed(tmp_path: Path) -> None:
    abandoned, elsewhere, other = tmp_path / "stoker-metrics-old", tmp_path / "elsewhere", tmp_path / "stoker-other"
    for folder in (abandoned, elsewhere, other):
        folder.mkdir()
        (folder / "file").write_text("")
    (tmp_path / "stoker-metrics-link").symlink_to(elsewhere)
    (tmp_path / "stoker-metrics-file").write_text("")
    with metrics_folder() as first:
        assert not abandoned.exists()
        with metrics_folder() as second:
            assert first.exists() and second.exists()
        assert first.exists() and not second.exists()
    for folder in (elsewhere, other):
        assert (folder / "file").exists()
    assert (tmp_path / "stoker-metrics-link").is_symlink()
    assert (tmp_path / "stoker-metrics-file").exists()


def test_servers_that_start_together_have_folders_of_their_own() -> None:
    """Each may take the other's folder for abandoned before it is locked."""
    barrier, folders = threading.Barrier(8), list[Path]()

    def serve() -> None:
        for _ in range(25):
            barrier.wait(60)
            with metrics_folder() as folder:
                (folder / "file").write_text("")
                folders.append(folder)
                barrier.wait(60)
                assert (folder / "file").exists()
                barrier.wait(60)

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(folders)) == 200
