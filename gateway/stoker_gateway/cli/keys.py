"""``stoker keys``: creates, lists and revokes the API keys of a gateway's clients."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from stoker_common.command_parser import CommandParser
from stoker_common.errors import ArgumentError
from stoker_gateway.keys import manifests, values
from stoker_gateway.keys.errors import KeyManifestError, KeyStoreError
from stoker_gateway.keys.file_store import FileStore
from stoker_gateway.keys.key import Key, Limits, digest_of, new_text
from stoker_gateway.keys.key_store import KeyStore

Value = TypeVar("Value")

_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DURATION: Final = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_COLUMNS: Final = ("id", "models", *manifests.LIMITS, "priority", "expires", "created")


def main(argv: list[str]) -> int:
    """Run a subcommand, and return the exit code: 2 for an invalid argument, 1 for other failures."""
    options = parser_of().parse_args(argv)
    try:
        result: int = options.run(options)
    except ArgumentError as error:
        print(f"stoker keys: {error}", file=sys.stderr)
        return 2
    except KeyStoreError as error:
        print(f"stoker keys: {error}", file=sys.stderr)
        return 1
    return result


def parser_of() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = CommandParser(prog="stoker keys", description="Manage the API keys of a gateway's clients.")
    commands = parser.add_subparsers(required=True, metavar="create|list|revoke")

    create = commands.add_parser("create", help="create a key and print its text, which is shown only this once")
    create.set_defaults(run=_create)
    _add_store_flags(create)
    create.add_argument("--id", type=_flag_type(values.key_id), help="id of the key (default: a random id)")
    create.add_argument(
        "--model",
        action="append",
        default=[],
        type=_flag_type(values.model),
        metavar="NAME",
        help="a model that the key may use; repeatable, * stands for any characters (default: all models)",
    )
    for flag, meaning in (
        ("--requests-per-minute", "requests that may start in a minute"),
        ("--tokens-per-minute", "tokens of prompts and outputs in a minute"),
        ("--concurrency", "concurrent requests"),
    ):
        create.add_argument(flag, type=_flag_type(values.limit), metavar="N", help=f"{meaning} (default: no limit)")
    create.add_argument(
        "--priority",
        type=_flag_type(values.priority),
        default=0,
        metavar="N",
        help="priority of its requests when all servers are full; higher ones go first (default: %(default)s)",
    )
    expiry = create.add_mutually_exclusive_group()
    expiry.add_argument(
        "--expires-in",
        type=_flag_type(_moment_after),
        dest="expires",
        metavar="30d",
        help="lifetime, in s, m, h, d or w",
    )
    expiry.add_argument(
        "--expires-at",
        type=_flag_type(_future_moment),
        dest="expires",
        metavar="2030-01-31T12:00:00Z",
        help="time at which the key expires, in RFC 3339 format",
    )
    create.add_argument("--output", choices=("text", "json"), default="text", help="format (default: %(default)s)")

    listing = commands.add_parser("list", help="list the keys, without their text, which is not stored")
    listing.set_defaults(run=_list)
    _add_store_flags(listing)
    listing.add_argument("--output", choices=("text", "json"), default="text", help="format (default: %(default)s)")

    revoke = commands.add_parser("revoke", help="revoke a key")
    revoke.set_defaults(run=_revoke)
    _add_store_flags(revoke)
    revoke.add_argument(
        "id", type=_flag_type(values.key_id), metavar="ID", help="id of the key, as shown by `stoker keys list`"
    )
    return parser


def _create(options: argparse.Namespace) -> int:
    limits = Limits(options.requests_per_minute, options.tokens_per_minute, options.concurrency)
    key_id = options.id or secrets.token_hex(4)
    text, store = new_text(key_id), _store(options)
    models = tuple(dict.fromkeys(options.model))
    key = Key(key_id, digest_of(text), models, limits, options.priority, options.expires)
    store.create(manifests.write(key))
    shown = {**_shown(key), "key": text}
    shown.pop("created")
    try:
        print(text if options.output == "text" else json.dumps(shown, ensure_ascii=False), flush=True)
    except OSError as error:
        store.delete(key_id)
        raise KeyStoreError(f"standard output is closed ({error.strerror}); no key was created") from None
    print(
        f"stoker keys: created the key {key_id!r} in {_store_name(options)}; its text is not shown again",
        file=sys.stderr,
    )
    return 0


def _list(options: argparse.Namespace) -> int:
    rows = []
    for manifest in _store(options).read():
        try:
            rows.append(_shown(manifests.read(manifest), manifest))
        except KeyManifestError as error:
            print(f"stoker keys: invalid key: {error}", file=sys.stderr)
    if options.output == "json":
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    lines = [[re.sub("([A-Z])", r" \1", name).upper() for name in _COLUMNS]]
    lines += [[_cell(row[name]) for name in _COLUMNS] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _revoke(options: argparse.Namespace) -> int:
    _store(options).delete(options.id)
    print(f"stoker keys: revoked the key {options.id!r} in {_store_name(options)}", file=sys.stderr)
    return 0


def _shown(key: Key, manifest: Any = None) -> dict[str, Any]:
    """Return the fields of a key that the commands show: all but its digest."""
    created = None if manifest is None else manifest["metadata"].get("creationTimestamp")
    if isinstance(created, datetime):  # YAML converts a time without quotes
        created = values.moment_text(created.replace(tzinfo=created.tzinfo or UTC).timestamp())
    return {
        "id": key.id,
        "models": list(key.models),
        **{field: getattr(key.limits, attribute) for field, attribute in manifests.LIMITS.items()},
        "priority": key.priority,
        "expires": None if key.expires is None else values.moment_text(key.expires),
        "created": created if isinstance(created, str) and created.isprintable() else None,
    }


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "all"
    return "-" if value is None else str(value)


def _add_store_flags(parser: argparse.ArgumentParser) -> None:
    store = parser.add_mutually_exclusive_group(required=True)
    store.add_argument("--file", type=Path, metavar="FILE", help="file of keys, for `stoker gateway --keys FILE`")
    store.add_argument(
        "--namespace",
        type=_flag_type(_namespace),
        metavar="NS",
        help="namespace of the gateway in the cluster, in which each key is a Secret",
    )


def _store(options: argparse.Namespace) -> KeyStore:
    if options.file is not None:
        return FileStore(options.file)
    from stoker_gateway.keys.cluster_store import ClusterStore

    return ClusterStore(options.namespace)


def _store_name(options: argparse.Namespace) -> str:
    return str(options.file) if options.file is not None else f"the namespace {options.namespace!r}"


def _flag_type(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a type for `add_argument` that reports the message of a ValueError from `read`."""

    def parse(text: str) -> Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _namespace(text: str) -> str:
    if not _NAMESPACE.fullmatch(text):
        raise ValueError(f"{values.shown(text)} is not a valid namespace name")
    return text


def _moment_after(text: str) -> float:
    if (match := _DURATION.fullmatch(text)) is None:
        raise ValueError(f"{values.shown(text)} is not a duration; write it like 30d, with s, m, h, d or w")
    moment = time.time() + int(match[1]) * _UNITS[match[2]]
    try:
        values.moment_text(moment)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} ends after the year 9999; leave it out for a key that does not expire") from None
    return moment


def _future_moment(text: str) -> float:
    moment = values.moment(text)
    if moment <= time.time():
        raise ValueError(f"{text!r} is in the past; choose a later time")
    return moment
