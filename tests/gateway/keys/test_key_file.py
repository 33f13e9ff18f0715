"""A key file that is replaced and edited while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from stoker_gateway.keys import key_file, manifests
from stoker_gateway.keys.errors import KeyManifestError
from stoker_gateway.keys.key import Key, digest_of
from stoker_gateway.keys.key_file import KeyFile
from stoker_gateway.keys.keyring import Keyring

from ...support.waiting import until_async


def text(*ids: str, **fields: str) -> str:
    documents = [manifests.write(Key(each, digest_of(each))) for each in ids]
    for document in documents:
        document["stringData"] |= fields
    return yaml.safe_dump_all(documents, explicit_start=True)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "PERIOD_S", 0.005)


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[Callable[[], asyncio.Future[Keyring]]]:
    """Watch a file; yield a function that waits for the next keyring."""
    keyrings = asyncio.Queue[Keyring]()
    task = asyncio.create_task(KeyFile(path).watch(keyrings.put_nowait))
    yield lambda: asyncio.ensure_future(asyncio.wait_for(keyrings.get(), 60))
    assert keyrings.empty()
    task.cancel()


async def looked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until the file has been checked three times."""
    looks = list[Path]()
    with monkeypatch.context() as patched:
        read = key_file.read_bytes
        patched.setattr(key_file, "read_bytes", lambda path: looks.append(path) or read(path))
        await until_async(lambda: len(looks) > 3)


async def until_logged(caplog: pytest.LogCaptureFixture, words: str) -> str:
    found = await until_async(lambda: [each.getMessage() for each in caplog.records if words in each.getMessage()])
    caplog.clear()
    [line] = found
    return line


def test_every_way_to_change_the_file_is_detected(tmp_path: Path) -> None:
    path, folders = tmp_path / "keys.yaml", [tmp_path / name for name in "ab"]
    path.write_text(text("k0"))

    async def main() -> None:
        async with watched(path) as next_one:
            path.write_text(text("k0", "k1"))  # in its place
            assert set((await next_one()).keys) == {"k0", "k1"}
            beside = tmp_path / "beside"
            beside.write_text(text("k1"))
            beside.replace(path)  # replaced by another file
            assert set((await next_one()).keys) == {"k1"}
            stamp = path.stat()
            path.write_text(text("k2"))  # same size, and an older time stamp
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            assert set((await next_one()).keys) == {"k2"}
            for number, folder in enumerate(folders):  # as a mounted ConfigMap changes
                folder.mkdir()
                (folder / "keys.yaml").write_text(text(f"l{number}"))
                link = tmp_path / "link"
                link.symlink_to(folder)
                link.replace(tmp_path / "data")
                if not number:
                    through = tmp_path / "through"
                    through.symlink_to(tmp_path / "data" / "keys.yaml")
                    through.replace(path)
                assert set((await next_one()).keys) == {f"l{number}"}
            path.unlink()
            path.write_text("")
            assert not (await next_one()).keys

    asyncio.run(main())


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"\xff\xfe\x00", b"a: 1\na: 2", b"[" * 100_000, b"\x00", b"a: !!python/name:os", None, "folder"],
)
def test_unreadable_file_keeps_previous_keys_and_is_logged_once(
    content: bytes | str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "stoker_gateway")
    path = tmp_path / "keys.yaml"
    path.write_text(text("k"))

    async def main() -> None:
        async with watched(path) as next_one:
            before = path.read_bytes()
            whole = tmp_path / "whole"  # replaces the file at once, since it may be read at any time
            if isinstance(content, bytes):
                whole.write_bytes(content)
                whole.replace(path)
            else:
                path.unlink()
                if content == "folder":
                    path.mkdir()
            line = await until_logged(caplog, "the previous keys stay valid")
            assert str(path) in line and "\n" not in line and len(line) < 300
            await looked_again(monkeypatch)
            assert not caplog.records
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            whole.write_bytes(before)
            whole.replace(path)
            await until_logged(caplog, "can be read again")
            whole.write_text(text("new"))
            whole.replace(path)
            assert set((await next_one()).keys) == {"new"}

    asyncio.run(main())


PIECES = [
    *(
        "&a ",
        "*a",
        "<<: *a\n",
        "{",
        "}",
        "[",
        "]",
        "? ",
        "- ",
        ": ",
        "!!set ",
        "!!omap ",
        "!!int ",
        "!!binary ",
        "!!bool ",
    ),
    *(
        "!!timestamp ",
        "!!float ",
        "!!python/object:os.system ",
        "!x ",
        "2020-99-99",
        "2020-01-01",
        "1:60:99",
        "9" * 5000,
    ),
    *(
        "\n",
        "  ",
        "\t",
        "---\n",
        "...\n",
        "%YAML 9.9\n",
        "|",
        "'",
        '"',
        "\\x",
        "\0",
        "\x85",
        "\ufeff",
        "\ud800",
        "&a [*a]",
    ),
]


@pytest.mark.parametrize("seed", range(0, 1500, 250))
def test_mutated_files_yield_keys_or_a_readable_error(seed: int) -> None:
    valid, refused = text("a", "b", "c"), 0
    for number in range(seed, seed + 250):
        rng, content = random.Random(number), valid
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(content) + 1)
            content = content[:at] + rng.choice(PIECES) + content[at + rng.choice([0, 0, 1, 30]) :]
        try:
            found = key_file.documents(content.encode("utf-8", "surrogatepass"), Path("keys.yaml"))
        except KeyManifestError as error:
            refused += 1
            assert str(error).startswith("keys.yaml ") and str(error).isprintable() and len(str(error)) < 400
        else:
            assert manifests.read_all(found)[0].keys.keys() <= {"a", "b", "c"}
    assert 0 < refused < 250


def test_key_changes_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stoker_gateway")
    path = tmp_path / "keys.yaml"
    path.write_text(text("a", "b"))

    async def main() -> None:
        async with watched(path) as next_one:
            assert [each.getMessage() for each in caplog.records] == [f"{path}: 2 valid keys"]
            for content, lines in [
                (text("a", "c"), ["keys added: c", "keys removed: b"]),
                (text("a", "c", priority="5"), ["keys changed: a, c"]),
                (
                    text("c", priority="5") + text("a", priority="high"),
                    [
                        "an invalid key is ignored: Secret stoker-key-a: priority: 'high' is not an integer from -1000"
                        " to 1000",
                        "keys removed: a",
                    ],
                ),
                (text("c") + text("a", priority="high"), ["keys changed: c"]),
                ("", ["keys removed: c", "there is no valid key, so every request is rejected until there is one"]),
            ]:
                caplog.clear()
                path.write_text(content)
                await next_one()
                assert [each.getMessage() for each in caplog.records] == [f"{path}: {line}" for line in lines]

    asyncio.run(main())


def test_unreadable_file_is_refused_at_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, says in [
        (tmp_path / "none", "does not exist"),
        (tmp_path, "is not a regular file"),
        (pipe, "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (Path("a\0b"), "cannot be read"),
        (Path("a" * 5000), "cannot be read"),
    ]:
        with pytest.raises(KeyManifestError, match=says):
            KeyFile(path)
    large = tmp_path / "large"
    large.write_bytes(b"#" * (key_file.MAX_BYTES + 1))
    with pytest.raises(KeyManifestError, match="larger than 16 MiB"):
        KeyFile(large)
