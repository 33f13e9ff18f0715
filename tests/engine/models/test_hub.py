"""Downloads by real processes from a fake hub (`fake_hub`)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker_engine.contract.termination_message import Reason, TerminationMessage

from ...support.waiting import until
from .fake_hub import COMMIT, FakeHub, Fetched, Refusal, fake_hub

_MIB = 1024**2
#: The library writes 10 MiB at a time.
WEIGHTS = random.Random(0).randbytes(25 * _MIB)

_LOCATE = """
import logging, sys
from stoker_engine.contract.engine_args import EngineArgs
from stoker_common.errors import StokerError
from stoker_engine.contract.termination_message import TerminationMessage
from stoker_engine.models.hub.locate import locate_model
logging.basicConfig(level=logging.INFO)
try:
    print(locate_model(EngineArgs("org/model", revision=sys.argv[1] or None)))
except StokerError as error:
    print(TerminationMessage.of(error))
    sys.exit(2)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "tf_model.h5": b"not wanted"}
    with fake_hub(files) as hub:
        yield hub


@pytest.fixture
def start(hub: FakeHub, tmp_path: Path) -> Iterator[Start]:
    """Start processes that locate the model, with a shared cache."""
    started: list[subprocess.Popen[str]] = []

    def begin(revision: str = "", **environment: str) -> subprocess.Popen[str]:
        env = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, **environment}
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            if name not in environment:
                env.pop(name, None)
        argv = [sys.executable, "-c", _LOCATE, revision]
        started.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def folder(process: subprocess.Popen[str]) -> Path:
    """Return the model's folder, after checking its files."""
    found, _ = folder_and_log(process)
    return found


def folder_and_log(process: subprocess.Popen[str]) -> tuple[Path, str]:
    """Return the model's folder, after checking its files, and the log."""
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, out + log
    found = Path(out.strip())
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    assert json.loads((found / "config.json").read_text()) == {}
    assert not (found / "tf_model.h5").exists()
    return found, log


def refused(process: subprocess.Popen[str]) -> TerminationMessage:
    """Return the error with which the process ended."""
    out, log = process.communicate(timeout=60)
    assert process.returncode == 2, out + log
    words = TerminationMessage.parse(out)
    assert words is not None, out
    return words


def test_two_processes_download_once(hub: FakeHub, start: Start) -> None:
    hub.pause_s = 0.002
    both = [start(), start("v1")]
    assert folder(both[0]) == folder(both[1])
    assert Counter(fetched.path for fetched in hub.fetched) == {"model.safetensors": 1, "config.json": 1}


def test_killed_download_is_continued(hub: FakeHub, start: Start, tmp_path: Path) -> None:
    hub.pause_s = 0.01
    process = start()
    have = _kill_during_the_download(process, tmp_path)
    hub.pause_s = 0
    folder(start())
    weights = [fetched for fetched in hub.fetched if fetched.path == "model.safetensors"]
    assert weights == [Fetched("model.safetensors", 0), Fetched("model.safetensors", have)]
    assert not list(tmp_path.rglob("*.incomplete"))


def test_damaged_partial_download_is_fetched_again(hub: FakeHub, start: Start, tmp_path: Path) -> None:
    hub.pause_s = 0.01
    process = start()
    _kill_during_the_download(process, tmp_path)
    (partial,) = tmp_path.rglob("*.incomplete")
    partial.write_bytes(bytes(partial.stat().st_size))
    hub.pause_s = 0
    folder(start())


def test_damaged_download_is_fetched_again(hub: FakeHub, start: Start) -> None:
    """`folder` checks the content."""
    hub.num_damaged = 1
    _, log = folder_and_log(start())
    assert "model.safetensors: the download has a wrong checksum; restarting it" in log
    weights = [fetched for fetched in hub.fetched if fetched.path == "model.safetensors"]
    assert weights == [Fetched("model.safetensors", 0)] * 2


def test_partial_download_is_restarted_if_the_hub_cannot_resume(hub: FakeHub, start: Start, tmp_path: Path) -> None:
    hub.pause_s = 0.01
    process = start()
    have = _kill_during_the_download(process, tmp_path)
    hub.pause_s, hub.resumes = 0, False
    _, log = folder_and_log(start())
    assert "checksum" not in log
    weights = [fetched for fetched in hub.fetched if fetched.path == "model.safetensors"]
    assert weights == [Fetched("model.safetensors", 0), Fetched("model.safetensors", have)]


def _kill_during_the_download(process: subprocess.Popen[str], cache: Path) -> int:
    """Kill it during the download; return the downloaded bytes."""
    _until_it_downloads(cache)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (partial,) = cache.rglob("*.incomplete")
    assert 0 < partial.stat().st_size < len(WEIGHTS)
    return partial.stat().st_size


def _until_it_downloads(cache: Path) -> None:
    until(lambda: any(path.stat().st_size for path in cache.rglob("*.incomplete")), "the download has started")


def test_complete_cache_needs_no_hub(hub: FakeHub, start: Start) -> None:
    found = folder(start())
    hub.close()
    for revision, offline in (("", ""), (COMMIT, ""), ("", "1")):
        again, log = folder_and_log(start(revision, HF_HUB_OFFLINE=offline))
        assert again == found
        assert "retrying in" not in log


def test_complete_cache_works_with_an_expired_token(hub: FakeHub, start: Start) -> None:
    found = folder(start())
    hub.refusal = Refusal(401, message="Invalid credentials in Authorization header")
    assert folder(start(HF_TOKEN="hf_expired")) == found


@pytest.mark.slow  # the library retries for long
def test_incomplete_cache_without_a_hub_is_reported(hub: FakeHub, start: Start, tmp_path: Path) -> None:
    folder(start())
    hub.close()
    next(tmp_path.rglob("snapshots/*/model.safetensors")).unlink()
    words = refused(start())
    assert words.reason is Reason.DOWNLOAD_FAILED
    assert hub.url in words.message


def test_temporary_errors_of_the_hub_are_retried(hub: FakeHub, start: Start) -> None:
    hub.failures = 3
    folder(start(HF_TOKEN="hf_mine"))
    assert hub.tokens == {"Bearer hf_mine"}


@pytest.mark.parametrize(
    "refusal, token, reason, expected",
    [
        (Refusal(404, "RepoNotFound"), "", Reason.MODEL_NOT_FOUND, "org/model"),
        (Refusal(401, message="Invalid username or password."), "", Reason.MODEL_NOT_FOUND, "tokenSecretRef"),
        (Refusal(401, message="Invalid username or password."), "hf_x", Reason.MODEL_ACCESS_DENIED, "tokenSecretRef"),
        (
            Refusal(401, message="Invalid credentials in Authorization header"),
            "hf_x",
            Reason.MODEL_ACCESS_DENIED,
            "401",
        ),
        (Refusal(401, "GatedRepo"), "", Reason.MODEL_ACCESS_DENIED, "gated"),
        (Refusal(403, "GatedRepo"), "hf_x", Reason.MODEL_ACCESS_DENIED, "terms"),
        (Refusal(403), "hf_x", Reason.MODEL_ACCESS_DENIED, "403"),
        pytest.param(Refusal(500), "", Reason.DOWNLOAD_FAILED, "500", marks=pytest.mark.slow),
    ],
)
def test_refusals_of_the_hub_have_their_reason(
    hub: FakeHub, start: Start, refusal: Refusal, token: str, reason: Reason, expected: str
) -> None:
    hub.refusal = refusal
    words = refused(start(HF_TOKEN=token))
    assert words.reason is reason
    assert expected in words.message
    assert "hf_x" not in words.message


def test_missing_revision_is_reported(start: Start) -> None:
    words = refused(start("v9"))
    assert words.reason is Reason.MODEL_NOT_FOUND
    assert "'v9'" in words.message


@pytest.mark.slow  # with retries
def test_unreachable_hub_is_reported(hub: FakeHub, start: Start) -> None:
    hub.close()
    words = refused(start())
    assert words.reason is Reason.DOWNLOAD_FAILED
    assert hub.url in words.message


def test_unwritable_cache_is_reported(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file where a folder must be")
    assert refused(start()).reason is Reason.DOWNLOAD_FAILED


def test_small_disk_is_reported_before_the_download(hub: FakeHub, start: Start) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _SMALL_DISK], env={**os.environ, "HF_ENDPOINT": hub.url}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "spec.storage.cache" in process.stdout
    assert not hub.fetched


def test_sigterm_ends_a_downloading_server(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause_s = 0.05
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
    serve = "import sys; from stoker_engine.cli.serve import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", serve, "org/model", "--host=127.0.0.1", "--port=0"]
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
        _until_it_downloads(tmp_path)
        hub.pause_s = 5  # the rest would take minutes
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert list(tmp_path.rglob("*.incomplete")), "the server waited for the download"
    assert "Traceback" not in log


_SMALL_DISK = """
import collections, os, shutil, tempfile
with tempfile.TemporaryDirectory() as home:
    os.environ["HF_HOME"] = home
    from stoker_common.errors import DownloadError
    from stoker_engine.models.hub.download import download
    usage = collections.namedtuple("usage", "total used free")
    shutil.disk_usage = lambda _: usage(100, 90, 10)
    try:
        download("org/model", None, ["*.safetensors"])
    except DownloadError as error:
        print(error)
"""
