"""An engine's cause of death in its pod's termination message."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from stoker_common import errors
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_engine.cli import termination_log
from stoker_engine.contract.termination_message import MAX_BYTES, Reason, TerminationMessage


@pytest.mark.parametrize("reason", Reason)
def test_termination_message_is_read_back(reason: Reason) -> None:
    words = TerminationMessage(reason, "model.safetensors: no such tensor: a\nsecond line")
    assert TerminationMessage.parse(f"{words}\n") == words


@pytest.mark.parametrize("text", ["", "Killed", "Traceback (most recent call last):", "NoSuchReason: x", "OutOfMemory"])
def test_foreign_termination_messages_are_ignored(text: str) -> None:
    assert TerminationMessage.parse(text) is None


def test_long_message_keeps_its_reason() -> None:
    text = str(TerminationMessage(Reason.ENGINE_DIED, "é" * MAX_BYTES))
    assert len(text.encode()) <= MAX_BYTES, "the kubelet cuts longer messages at the front"
    words = TerminationMessage.parse(text)
    assert words is not None and words.reason is Reason.ENGINE_DIED


def test_termination_log_is_cut_to_the_kubelets_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "termination-log"
    monkeypatch.setenv(termination_log.VARIABLE, str(file))
    termination_log.write(TerminationMessage(Reason.ENGINE_DIED, "x" * MAX_BYTES))
    assert file.stat().st_size == MAX_BYTES


def test_termination_log_contains_paths_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "termination-log"
    monkeypatch.setenv(termination_log.VARIABLE, str(file))
    termination_log.write(TerminationMessage(Reason.MODEL_NOT_FOUND, "/models/\udcff is missing"))
    assert file.read_text() == "ModelNotFound: /models/? is missing"


@pytest.mark.parametrize("value", [None, ""])
def test_kubernetes_file_is_written_only_if_it_exists(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "termination-log"
    monkeypatch.setattr(termination_log, "_KUBERNETES", str(file))
    monkeypatch.delenv(termination_log.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(termination_log.VARIABLE, value)
    termination_log.write(TerminationMessage(Reason.ENGINE_DIED, "x"))
    assert not file.exists()
    file.touch()
    termination_log.write(TerminationMessage(Reason.ENGINE_DIED, "x"))
    assert file.read_text() == "EngineDied: x"


@pytest.mark.parametrize(
    "error, reason",
    [
        (errors.ModelNotFoundError("x"), Reason.MODEL_NOT_FOUND),
        (errors.ModelAccessDeniedError("x"), Reason.MODEL_ACCESS_DENIED),
        (errors.DownloadError("x"), Reason.DOWNLOAD_FAILED),
        (errors.OutOfMemoryError("x"), Reason.OUT_OF_MEMORY),
        (errors.EngineOutOfMemoryError("x"), Reason.OUT_OF_MEMORY),
        (errors.WeightsError("x"), Reason.MODEL_UNSUPPORTED),
        (errors.ModelError("x"), Reason.MODEL_UNSUPPORTED),
        (errors.ArgumentError("--dtype", "x"), Reason.START_ERROR),
        (errors.EngineDeadError("x"), Reason.ENGINE_DIED),
    ],
)
def test_errors_keep_their_reason_across_the_pipe(error: errors.StokerError, reason: Reason) -> None:
    crossed = pickle.loads(pickle.dumps(LoadFailed.of(error))).error()
    for each in (error, crossed):
        assert TerminationMessage.of(each) == TerminationMessage(reason, str(error))


def test_errors_without_a_reason_get_that_of_their_phase() -> None:
    assert TerminationMessage.of(errors.StokerError("no address"), Reason.START_ERROR).reason is Reason.START_ERROR
    assert TerminationMessage.of(ZeroDivisionError("by zero")) == TerminationMessage(
        Reason.ENGINE_DIED, "ZeroDivisionError: by zero"
    )
