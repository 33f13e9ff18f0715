"""Keys created and revoked in a file that users edit too."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stoker_common.errors import ArgumentError
from stoker_gateway.keys import manifests
from stoker_gateway.keys.errors import KeyStoreError
from stoker_gateway.keys.file_store import FileStore
from stoker_gateway.keys.key import Key, Limits, digest_of

_CREATE = """
import sys
from pathlib import Path
from stoker_gateway.keys import manifests
from stoker_gateway.keys.file_store import FileStore
from stoker_gateway.keys.key import Key, digest_of
for name in sys.argv[2:]:
    FileStore(Path(sys.argv[1])).create(manifests.write(Key(name, digest_of(name))))
"""


def key(name: str, *models: str) -> Key:
    return Key(name, digest_of(name), models, Limits(tokens_per_minute=5), -1, 2e9)


def keys(path: Path) -> dict[str, Key]:
    keyring, faults = manifests.read_all(FileStore(path).read())
    assert not faults
    return dict(keyring.keys)


@pytest.mark.parametrize("seed", range(10))
def test_documents_and_comments_of_users_are_preserved(seed: int, tmp_path: Path) -> None:
    rng, path = random.Random(seed), tmp_path / "keys.yaml"
    store, notes = FileStore(path), ["# Eve's, not Adam's: «ключ»"]
    beginnings = ["", "# ours\n", "---\n", "# ours\n---\n", "\n---\n---\n", "\ufeff# ours\n"]
    path.write_text(rng.choice(beginnings))
    expected = dict[str, Key]()
    for number in range(14):
        draw = rng.random()
        if draw < 0.5 or not expected:
            made = key(
                f"k{number}", *rng.sample(["m", "org/*", "*", "ü: ñ #", "'\"|>", "- a", "null", "1"], rng.randint(0, 3))
            )
            store.create(manifests.write(made))
            expected[made.id] = made
        elif draw < 0.75:
            deleted = rng.choice(sorted(expected))
            store.delete(deleted)
            del expected[deleted]
            with pytest.raises(ArgumentError, match=f"no key '{deleted}'"):
                store.delete(deleted)
        else:
            by_hand = key(f"t{number}", "theirs")
            note = f"# note {number:02}"
            text = yaml.safe_dump(manifests.write(by_hand), sort_keys=bool(number % 2), explicit_end=rng.random() < 0.3)
            before = path.read_text().rstrip("\n")
            path.write_text(f"{before}\n---\n{text.rstrip()}\n{note}" + rng.choice(["", "\n", "\n\n"]))
            notes.append(note)
            expected[by_hand.id] = by_hand
        assert keys(path) == expected
        content = path.read_text()
        for each in notes[1:]:
            key_id = f"t{int(each.split()[-1])}"
            assert (each in content) == (key_id in expected)
    for deleted in sorted(expected):
        store.delete(deleted)
    assert keys(path) == {}
    store.create(manifests.write(key("last")))
    assert keys(path) == {"last": key("last")}


def test_file_mode_is_kept_and_a_new_file_is_private(tmp_path: Path) -> None:
    path, link = tmp_path / "keys.yaml", tmp_path / "link"
    link.symlink_to(path)
    FileStore(link).create(manifests.write(key("a")))
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    FileStore(link).create(manifests.write(key("b")))
    FileStore(path).delete("a")
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["keys.yaml", "link"]


def test_existing_key_id_is_refused(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "keys.yaml")
    store.create(manifests.write(key("a")))
    before = store.read()
    with pytest.raises(ArgumentError, match=r"--id: the key 'a' already exists"):
        store.create(manifests.write(key("a", "m")))
    assert store.read() == before


def test_a_broken_key_can_be_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("kind: Secret\nmetadata: {name: stoker-key-a}\nstringData: []\n---\n5\n---\n[]\n")
    FileStore(path).delete("a")
    assert FileStore(path).read() == [5, []]


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    names = [[f"p{process}-{number}" for number in range(8)] for process in range(4)]
    running = [subprocess.Popen([sys.executable, "-c", _CREATE, str(path), *each]) for each in names]
    assert [each.wait(120) for each in running] == [0] * len(running)
    assert keys(path).keys() == {name for each in names for name in each}


def test_unsupported_files_are_refused_and_unchanged(tmp_path: Path) -> None:
    files = {
        "not-yaml": b"a: [",
        "latin": b"# \xe9\n",
        "wide": "# ours\n".encode("utf-16"),
        "twice": b"a: 1\na: 2\n",
        "anchors": b"%TAG ! tag:x,2000:\n---\n!a {}\n",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        for change in (lambda store: store.create(manifests.write(key("a"))), lambda store: store.delete("a")):
            with pytest.raises(ArgumentError, match=r"^--file: ") as error:
                change(FileStore(path))
            assert str(error.value).count("\n") == 0
        assert path.read_bytes() == content
    for path in (tmp_path / "none" / "keys.yaml", tmp_path, Path("a\0b"), tmp_path / ("a" * 300)):
        with pytest.raises((ArgumentError, KeyStoreError)) as error:
            FileStore(path).create(manifests.write(key("a")))
        assert str(error.value).count("\n") == 0
    assert {each.name for each in tmp_path.iterdir()} == files.keys()
