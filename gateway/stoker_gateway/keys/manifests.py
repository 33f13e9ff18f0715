"""Conversion between keys and manifests of Kubernetes Secrets, the format of keys both in a cluster and in files.

    apiVersion: v1
    kind: Secret
    metadata: {name: stoker-key-ID, labels: {stoker.dev/gateway-key: "true"}}
    type: stoker.dev/gateway-key
    stringData:
      sha256: …                       of the key's text
      models: "org/*\\ngemma"          one per line; absent: all models
      requestsPerMinute: "600"        absent: no limit; also for the next two
      tokensPerMinute: "100000"
      concurrency: "8"
      priority: "0"
      expires: "2030-01-31T12:00:00Z" absent: never

A manifest with an unknown or invalid field is rejected, because a misspelled limit must not mean no limit.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from stoker_gateway.keys import values
from stoker_gateway.keys.errors import KeyManifestError
from stoker_gateway.keys.key import Key, Limits
from stoker_gateway.keys.keyring import Keyring

Value = TypeVar("Value")
Manifest = dict[str, Any]

#: Type of the Secrets, and the label that selects them.
TYPE: Final = "stoker.dev/gateway-key"
LABEL: Final = "stoker.dev/gateway-key"

_NAME: Final = "stoker-key-"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
#: Field of a limit → attribute of `Limits`.
LIMITS: Final = {
    "requestsPerMinute": "requests_per_minute",
    "tokensPerMinute": "tokens_per_minute",
    "concurrency": "concurrency",
}
_FIELDS: Final = ("sha256", "models", *LIMITS, "priority", "expires")


def name_of(key_id: str) -> str:
    """Return the name of a key's Secret."""
    return f"{_NAME}{key_id}"


def write(key: Key) -> Manifest:
    """Return the manifest of a key."""
    fields = {"sha256": key.digest}
    if key.models:
        fields["models"] = "\n".join(key.models)
    for field, attribute in LIMITS.items():
        if (limit := getattr(key.limits, attribute)) is not None:
            fields[field] = str(limit)
    if key.priority:
        fields["priority"] = str(key.priority)
    if key.expires is not None:
        fields["expires"] = values.moment_text(key.expires)
    metadata = {"name": name_of(key.id), "labels": {LABEL: "true"}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": TYPE, "stringData": fields}


def read(manifest: Any) -> Key:
    """Return the key of a manifest, written by a user or returned by the API server.

    Raises:
        KeyManifestError: the manifest is invalid; the message names the Secret and, if known, the field.
    """
    name = secret_name(manifest)
    if name is None:
        raise KeyManifestError("a document is not a manifest of a Secret with a name")
    try:
        return _read(manifest, name)
    except ValueError as error:
        raise KeyManifestError(f"Secret {name}: {error}") from None


def read_all(manifests: Iterable[Any]) -> tuple[Keyring, list[str]]:
    """Return the keys of the valid manifests, and messages about invalid and duplicate ones. Keys whose Secrets are
    being deleted are left out."""
    keys, digests, faults = dict[str, Key](), set[str](), list[str]()
    for manifest in manifests:
        try:
            key = read(manifest)
        except KeyManifestError as error:
            faults.append(str(error))
            continue
        if manifest["metadata"].get("deletionTimestamp") is not None:
            continue
        if key.id in keys:
            faults.append(f"Secret {name_of(key.id)}: an earlier document has the same name; remove one of them")
        elif key.digest in digests:
            faults.append(f"Secret {name_of(key.id)}: sha256: another Secret has the same value; revoke one of them")
        else:
            keys[key.id] = key
            digests.add(key.digest)
    return Keyring(keys.values()), faults


def secret_name(manifest: Any) -> str | None:
    """Return the Secret's name in a manifest; None if there is no valid name."""
    metadata = manifest.get("metadata") if isinstance(manifest, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) and name and name.isprintable() and len(name) <= 253 else None


def _read(manifest: Mapping[str, Any], name: str) -> Key:
    if (manifest.get("apiVersion"), manifest.get("kind")) not in (
        ("v1", "Secret"),
        (None, None),
    ):  # items of API lists have neither
        raise ValueError("kind: must be Secret, with apiVersion v1")
    if manifest.get("type") != TYPE:
        raise ValueError(f"type: must be {TYPE}")
    labels = manifest["metadata"].get("labels")
    if not isinstance(labels, Mapping) or labels.get(LABEL) != "true":
        raise ValueError(f'metadata.labels: {LABEL} must be "true"')
    if not name.startswith(_NAME):
        raise ValueError(f"metadata.name: must be {_NAME}ID")
    key_id = _value("metadata.name", values.key_id, name.removeprefix(_NAME))
    fields = _fields(manifest)
    for field in fields:
        if field not in _FIELDS:
            raise ValueError(f"{_shown(field)}: unknown field; the known fields are {', '.join(_FIELDS)}")
    if not _SHA256.fullmatch(fields.get("sha256", "")):
        raise ValueError(
            "sha256: must be the SHA-256 of the key's text, as 64 digits of 0-9 and a-f"
        )  # does not show the value, which may be the key
    limits = {
        attribute: _value(field, values.limit, fields[field]) for field, attribute in LIMITS.items() if field in fields
    }
    return Key(
        key_id,
        fields["sha256"],
        _value("models", _models, fields["models"]) if "models" in fields else (),
        Limits(**limits),
        _value("priority", values.priority, fields["priority"]) if "priority" in fields else 0,
        _value("expires", values.moment, fields["expires"]) if "expires" in fields else None,
    )


def _fields(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of `data` and `stringData`; the latter takes precedence, as in the API server."""
    fields = dict[str, str]()
    for section in ("data", "stringData"):
        entries = manifest.get(section)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            raise ValueError(f"{section}: must be a mapping")
        for field, value in entries.items():
            if not isinstance(field, str) or not isinstance(value, str):
                raise ValueError(f"{section}.{_shown(field)}: must be a string; put it in quotes")
            fields[field] = _decoded(field, value) if section == "data" else value
    return fields


def _decoded(field: str, value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        raise ValueError(f"data.{_shown(field)}: must be UTF-8 text in base64") from None


def _models(text: str) -> tuple[str, ...]:
    models = tuple(dict.fromkeys(values.model(line) for line in text.split("\n") if line))
    if not models:
        raise ValueError("names no model; leave out the field to allow all models")
    return models


def _value(field: str, read: Callable[[str], Value], text: str) -> Value:
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _shown(field: object) -> str:
    text = str(field)[:80]
    return text if text.isprintable() else repr(text)
