"""``stoker keys``: its output, what it stores, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker_gateway.cli.keys import main
from stoker_gateway.keys import manifests, values
from stoker_gateway.keys.errors import UnauthorizedError
from stoker_gateway.keys.file_store import FileStore
from stoker_gateway.keys.key import Limits
from stoker_gateway.keys.keyring import Keyring

NOW = 2_000_000_000.0


def keyring(path: Path) -> Keyring:
    keyring, faults = manifests.read_all(FileStore(path).read())
    assert not faults
    return keyring


def test_key_text_is_printed_once_and_stored_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    path = tmp_path / "keys.yaml"
    for output in ("text", "json"):
        words = ["--id", output, "--model", "org/*", "--model", "b", "--model", "b", "--requests-per-minute", "600"]
        words += ["--tokens-per-minute", "100000", "--concurrency", "8", "--priority", "-5", "--expires-in", "30d"]
        assert main(["create", "--file", str(path), *words, "--output", output]) == 0
        captured = capsys.readouterr()
        text = json.loads(captured.out)["key"] if output == "json" else captured.out.removesuffix("\n")
        assert text not in captured.err and text not in path.read_text()
        key = keyring(path).find(text, time.time())
        assert (key.id, key.models, key.limits, key.priority) == (output, ("org/*", "b"), Limits(600, 100_000, 8), -5)
        assert key.expires == NOW + 30 * 86_400
    assert main(["create", "--file", str(path)]) == 0
    text = capsys.readouterr().out.strip()
    assert keyring(path).find(text, time.time()).limits == Limits()

    assert main(["list", "--file", str(path), "--output", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 3
    moments = {name: listed[0].pop(name) for name in ("expires", "created")}
    assert listed[0] == {
        "id": "text",
        "models": ["org/*", "b"],
        "requestsPerMinute": 600,
        "tokensPerMinute": 100_000,
        "concurrency": 8,
        "priority": -5,
    }
    assert values.moment(moments["expires"]) == NOW + 30 * 86_400
    assert values.moment(moments["created"]) > 1_700_000_000
    assert main(["list", "--file", str(path)]) == 0
    table = capsys.readouterr().out
    assert "org/*, b" in table and len(table.splitlines()) == 4
    for key in keyring(path).keys.values():
        assert key.id in table and key.digest not in table + json.dumps(listed)

    assert main(["revoke", "--file", str(path), text.split("-")[2]]) == 0
    with pytest.raises(UnauthorizedError):
        keyring(path).find(text, time.time())
    assert keyring(path).keys.keys() == {"text", "json"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "create|list|revoke"),
        (["delete"], "delete"),
        (["create"], "--file"),
        (["list"], "--namespace"),
        (["create", "--file", "FILE", "--namespace", "x"], "--namespace"),
        (["revoke", "--file", "FILE"], "ID"),
        (["revoke", "--file", "FILE", "A"], "ID"),
        (["revoke", "--file", "FILE", "taken", "other"], "other"),
        (["revoke", "--file", "FILE", "unknown"], "ID"),
        (["revoke", "--namespace", "../x", "a"], "--namespace"),
        (["list", "--namespace", ""], "--namespace"),
        (["list", "--namespace", "a" * 5000], "--namespace"),
        (["list", "--file", "none.yaml"], "--file"),
        (["create", "--file", "nowhere/keys.yaml"], "--file"),
        (["create", "--file", ""], "--file"),
        *(
            (["create", "--file", "FILE", flag, text], flag)
            for flag, texts in {
                "--id": ["taken", "", "A", "-", "a-", "a_b", "a" * 41, "ä", "a\n", "a/b"],
                "--model": ["", " m", "m ", "m\n", "\udcff"],
                "--requests-per-minute": ["0", "-1", "1.5", "٣", "9" * 5000, ""],
                "--tokens-per-minute": ["many"],
                "--concurrency": ["0x1"],
                "--priority": ["1001", "-1001", "high"],
                "--expires-in": ["0d", "-1d", "30", "30D", "1y", "d", "999999w", "9" * 5000 + "d", "٣d"],
                "--expires-at": ["2020-01-01T00:00:00Z", "2030-01-01", "tomorrow", "9999-12-31T23:59:59-10:00"],
                "--output": ["yaml"],
            }.items()
            for text in texts
        ),
        (["create", "--file", "FILE", "--expires-in", "1d", "--expires-at", "2030-01-01T00:00:00Z"], "--expires-at"),
    ],
)
def test_wrong_command_lines_are_refused_and_change_nothing(
    words: list[str],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["create", "--file", "FILE", "--id", "taken"]) == 0
    before = Path("FILE").read_bytes()
    capsys.readouterr()
    try:
        code: object = main(words)
    except SystemExit as exit:
        code = exit.code
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    line, *hint = output.err.splitlines()
    assert all(each.startswith("Try 'stoker keys") for each in hint)
    assert line.startswith("stoker keys") and named in line and len(line) < 400
    assert Path("FILE").read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["FILE"]


def test_no_key_is_created_if_its_text_cannot_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    program = "import sys; from stoker_gateway.cli.keys import main; sys.exit(main(sys.argv[1:]))"
    with Path("/dev/full").open("w") as full:
        words = ["create", "--file", str(path)]
        ended = subprocess.run([sys.executable, "-c", program, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("stoker keys: standard output ")
    assert "Traceback" not in ended.stderr
    assert not keyring(path).keys


def test_missing_cluster_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["list", "--namespace", "stoker"]) == 1
    assert "KUBECONFIG" in capsys.readouterr().err
