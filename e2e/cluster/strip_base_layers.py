#!/usr/bin/env python3
"""Convert the output of `docker save` to an OCI image layout without the layers that a node already has:

    strip_base_layers.py ARCHIVE [CHAIN_ID...] >OUT

A node's containerd stores each unpacked layer as a snapshot named by the layer's chain ID, a digest of it and of all
layers below. It imports archives that lack layers whose snapshots exist. So if only the last layer of a large image
changes, only that layer is transferred.

Layer digests depend on the Docker version. Most save layers uncompressed, and `rootfs.diff_ids` in the image's
configuration lists their digests in the same order. A Docker with the containerd image store saves layers compressed,
as they were pulled, under names that are their digests (`blobs/sha256/HEX`).
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
_LAYER = "application/vnd.docker.image.rootfs.diff.tar"  # containerd detects compression itself
_BLOBS = "blobs/sha256/"


def strip_base_layers(archive: Path, has: Collection[str], out: IO[bytes]) -> None:
    """Write the images of an archive, without the layers in `has`.

    Args:
        archive: output file of `docker save IMAGE...`.
        has: chain IDs of layers that the node has, as ``sha256:HEX``
            (OCI Image Format Specification, "Layer ChainID").
        out: receives a tar archive; need not be seekable.
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
    """Open a file of an archive. Links are followed: an image that has a layer twice contains one.

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
