"""An image's archive loses exactly the layers that a node has, and describes all layers for containerd."""

from __future__ import annotations

import hashlib
import io
import json
import runpy
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "e2e/cluster/strip_base_layers.py"
strip_base_layers = runpy.run_path(str(SCRIPT))["strip_base_layers"]

OLD, NEW = b"a big layer", b"a layer that changed"
TAG = "stoker/engine-cpu:dev"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


CONFIG = json.dumps({"rootfs": {"type": "layers", "diff_ids": [digest(OLD), digest(NEW)]}}).encode()
BLOB = "blobs/sha256/" + "c" * 64
#: Docker's formats: before 25, since 25, and with the containerd image store, where layers are compressed and their
#: names differ from those in the configuration.
BEFORE_25 = {"1/layer.tar": OLD, "2/layer.tar": NEW, "ab.json": CONFIG}
SINCE_25 = {digest(each).replace("sha256:", "blobs/sha256/"): each for each in (OLD, NEW, CONFIG)}
CONTAINERD = {digest(OLD).replace("sha256:", "blobs/sha256/"): OLD, BLOB: NEW, "blobs/sha256/ab": CONFIG}


def chain(*layers: bytes) -> str:
    """Return the chain ID of the last of these layers, each on top of the previous one."""
    *below, last = layers
    return digest(f"{chain(*below)} {digest(last)}".encode()) if below else digest(last)


def saved(folder: Path, files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> Path:
    """Write an archive as `docker save` does: two layers and a configuration, in this order, beside other files."""
    old, new, config = files
    manifest = [{"Config": config, "RepoTags": [TAG], "Layers": [old, new, *(links or ())]}]
    path = folder / "image.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in {**files, "repositories": b"{}", "manifest.json": json.dumps(manifest).encode()}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return path


def thinned(archive: Path, *has: str) -> dict[str, bytes]:
    """Return the files of the archive for a node that has these layers."""
    out = io.BytesIO()
    strip_base_layers(archive, has, out)
    out.seek(0)
    with tarfile.open(fileobj=out) as layout:
        return {name: layout.extractfile(name).read() for name in layout.getnames()}  # type: ignore[union-attr]


def manifest_of(layout: dict[str, bytes]) -> Any:
    (described,) = json.loads(layout["index.json"])["manifests"]
    assert described["annotations"] == {"io.containerd.image.name": f"docker.io/{TAG}"}
    return json.loads(layout["blobs/sha256/" + described["digest"].removeprefix("sha256:")])


@pytest.mark.parametrize("files", [BEFORE_25, SINCE_25])
def test_only_missing_layers_are_kept(tmp_path: Path, files: dict[str, bytes]) -> None:
    # The node has the changed layer only on another image's layers, or alone.
    layout = thinned(saved(tmp_path, files), digest(OLD), chain(b"of another image", NEW), digest(NEW))
    manifest = manifest_of(layout)
    assert manifest["config"]["digest"] == digest(CONFIG)
    assert [(each["digest"], each["size"]) for each in manifest["layers"]] == [
        (digest(OLD), len(OLD)),
        (digest(NEW), len(NEW)),
    ]
    assert set(layout.values()) >= {CONFIG, NEW}
    assert OLD not in layout.values()


def test_node_without_layers_gets_all(tmp_path: Path) -> None:
    layout = thinned(saved(tmp_path, BEFORE_25))
    assert set(layout.values()) >= {CONFIG, OLD, NEW}
    blobs = {name: content for name, content in layout.items() if name.startswith("blobs/")}
    assert {name.removeprefix("blobs/") for name in blobs} == {
        digest(content).replace(":", "/") for content in blobs.values()
    }


def test_compressed_layer_keeps_its_own_digest(tmp_path: Path) -> None:
    archive = saved(tmp_path, CONTAINERD)
    layout = thinned(archive, digest(OLD))
    assert layout[BLOB] == NEW
    assert OLD not in layout.values()
    has_it = thinned(archive, digest(OLD), chain(OLD, NEW))
    assert BLOB not in has_it
    for each in layout, has_it:
        assert manifest_of(each)["layers"][1] == {
            "mediaType": "application/vnd.docker.image.rootfs.diff.tar",
            "digest": BLOB.replace("blobs/sha256/", "sha256:"),
            "size": len(NEW),
        }


def test_repeated_layer_is_kept_once(tmp_path: Path) -> None:
    config = json.dumps({"rootfs": {"diff_ids": [digest(OLD), digest(NEW), digest(NEW)]}}).encode()
    archive = saved(tmp_path, {**BEFORE_25, "ab.json": config}, links={"3/layer.tar": "../2/layer.tar"})
    for has in [], [digest(OLD)], [digest(OLD), chain(OLD, NEW)]:
        layout = thinned(archive, *has)
        assert [each["size"] for each in manifest_of(layout)["layers"]] == [len(OLD), len(NEW), len(NEW)]
        assert list(layout.values()).count(NEW) == 1
    assert NEW not in thinned(archive, digest(OLD), chain(OLD, NEW), chain(OLD, NEW, NEW)).values()
