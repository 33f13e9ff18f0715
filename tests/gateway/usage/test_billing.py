"""The billing log: no line is lost or duplicated, whatever happens to the file."""

from __future__ import annotations

import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from stoker_gateway.usage import billing
from stoker_gateway.usage.billing import BillingLog
from stoker_gateway.usage.completed_request import CompletedRequest
from stoker_gateway.usage.tokens import Tokens

from ...support.waiting import until

ENDED = CompletedRequest(
    "m", "team", "", 1, ("10.0.0.1:80",), False, 200, Tokens(3, 1, 2), 10, False, 1795420800.25, 1.0, "r"
)


def ids(*files: Path) -> list[str]:
    return [json.loads(line)["request_id"] for file in files for line in file.read_text().split("\n") if line]


def test_billing_line_contains_the_usage(tmp_path: Path) -> None:
    log = BillingLog(str(tmp_path / "log"))
    hostile = '"\n{}\u2028' + "x" * 500
    log.ended(replace(ENDED, request_id=hostile, status=0, key="", aborted=True))
    log.ended(replace(ENDED, tokens=Tokens()))
    log.close()
    [line] = (tmp_path / "log").read_bytes().splitlines()
    assert json.loads(line) == {
        "time": "2026-11-23T08:00:00.250Z", "key": None, "model": "m", "prompt_tokens": 3, "cached_tokens": 1,
        "output_tokens": 2, "estimated": False, "aborted": True, "request_id": hostile[:128], "status": None,
    }  # fmt: skip
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o640


def test_rotation_and_partial_writes_lose_and_duplicate_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, write = random.Random(0), os.write
    failed = threading.Event()

    def in_part(file: int, data: bytes) -> int:
        if chance.random() < 0.02:
            failed.set()
            raise OSError("No space left on device")
        return write(file, data[: chance.randrange(1, len(data) + 1)] if chance.random() < 0.3 else data)

    monkeypatch.setattr(billing.os, "write", in_part)
    monkeypatch.setattr(billing, "_AGAIN_S", 0.001)
    destination = tmp_path / "log"
    destination.write_text(json.dumps({"request_id": "before"}) + "\n")
    log = BillingLog(str(destination))
    names = [f"r{number}" for number in range(500)]
    for number, name in enumerate(names):
        log.ended(replace(ENDED, request_id=name))
        if number % 100 == 50:
            until(lambda: destination.exists())
            destination.rename(tmp_path / f"log.{number // 100}")
    monkeypatch.setattr(billing.os, "write", write)
    log.close()
    assert failed.is_set()
    files = [tmp_path / f"log.{number}" for number in range(5)]
    assert ids(*files, destination) == ["before", *names]


def test_each_period_of_lost_lines_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, is_full = os.write, threading.Event()

    def refused_while_full(file: int, data: bytes) -> int:
        if is_full.is_set():
            raise OSError("No space left on device")
        return write(file, data)

    monkeypatch.setattr(billing.os, "write", refused_while_full)
    monkeypatch.setattr(billing, "_AGAIN_S", 0.001)
    monkeypatch.setattr(billing, "MAX_LINES", 3)
    log = BillingLog(str(tmp_path / "log"))
    for period in range(2):
        is_full.set()
        for number in range(6):
            log.ended(replace(ENDED, request_id=f"{period} {number}"))
        is_full.clear()
        until(lambda: not log._lines)
        until(lambda: not log._is_losing)
    log.close()
    assert ids(tmp_path / "log") == [f"{period} {number}" for period in range(2) for number in range(3)]
    messages = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
    once = "the billing log could not be written for too long: lines are lost"
    assert messages == [once, once, "6 lines of the billing log were lost"]


def test_unwritable_destination_is_refused(tmp_path: Path) -> None:
    for destination in (tmp_path, tmp_path / "no" / "log"):
        with pytest.raises(OSError, match=str(tmp_path)):
            BillingLog(str(destination))
