#!/usr/bin/env python3
"""What `docker save` wrote, as an OCI image layout without what a node has:

    strip_base_layers.py ARCHIVE [CHAIN_ID...] >OUT

A node's containerd keeps what each layer of its images unpacked to, as a snapshot whose name is the layer's chain ID: a
digest of it and of all layers below. It takes in an archive without the layers whose snapshots are there already. So
when the last layer of an image of gigabytes changes, only that layer travels.

A layer's digest depends on the Docker. Most save layers unpacked, and `rootfs.diff_ids` in the image's configuration
has their digests in the same order; a Docker that keeps images in containerd's store saves layers as they were pulled,
compressed, under names that are their digests (`blobs/sha256/HEX`).
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar"  # containerd looks for itself whether it is compressed
_BLOBS = "blobs/sha256/"


def strip_base_layers(archive: Path, has: Collection[str], out: IO[bytes]) -> None:
    """Writes the images of an archive, without the layers in `has`.

    Args:
        archive: what `docker save IMAGE...` wrote, as a file.
        has: chain IDs of layers that are unpacked there already, as ``sha256:HEX``
            (OCI Image Format Specification, "Layer ChainID").
        out: gets a tar archive, front to back.
    """
    with tarfile.open(archive) as saved, tarfile.open(fileobj=out, mode="w|") as layout:
        written = set[str]()

        def describe(content: IO[bytes], media_type: str, digest: str) -> dict[str, Any]:
            return {"mediaType": media_type, "digest": digest, "size": content.seek(0, io.SEEK_END)}

        def put(content: IO[bytes], media_type: str, digest: str) -> dict[str, Any]:
            described = describe(content, media_type, digest)
            if digest not in written:
                content.seek(0)
                _add(layout, _BLOBS + digest.removeprefix("sha256:"), content, described["size"])
                written.add(digest)  # images share layers, and an image may have a layer twice
            return described

        index = []
        for image in json.load(_file(saved, "manifest.json")):
            config = _file(saved, image["Config"]).read()
            layers, chain_id = [], ""
            for name, diff_id in zip(image["Layers"], json.loads(config)["rootfs"]["diff_ids"], strict=True):
                chain_id = _digest(f"{chain_id} {diff_id}".encode()) if chain_id else diff_id
                digest = f"sha256:{name[len(_BLOBS) :]}" if name.startswith(_BLOBS) else diff_id
                layers.append((describe if chain_id in has else put)(_file(saved, name), _LAYER, digest))
            manifest = {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": put(io.BytesIO(config), _CONFIG, _digest(config)),
                "layers": layers,
            }
            text = json.dumps(manifest).encode()
            described = put(io.BytesIO(text), _MANIFEST, _digest(text))
            index += [
                described | {"annotations": {"io.containerd.image.name": f"docker.io/{tag}"}}
                for tag in image["RepoTags"]
            ]
        for name, document in [
            ("index.json", {"schemaVersion": 2, "manifests": index}),
            ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
        ]:
            text = json.dumps(document).encode()
            _add(layout, name, io.BytesIO(text), len(text))


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    """A file of an archive, also where it is a link to one, as a layer is that an image has twice.

    Raises:
        KeyError: there is no such name.
    """
    file = archive.extractfile(name)
    assert file, f"{name} is no file"
    return file


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _add(layout: tarfile.TarFile, name: str, content: IO[bytes], size: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = size
    layout.addfile(entry, content)


if __name__ == "__main__":
    strip_base_layers(Path(sys.argv[1]), sys.argv[2:], sys.stdout.buffer)
